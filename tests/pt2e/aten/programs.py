"""Models whose programs other compilers run, with their inputs."""

import pytest
import torch
from torch import nn

from pt2mx.pt2e.models.packaged import load_minilm

#: recipe -> the least SQNR of outputs, in dB: sums in another order move activations to neighbouring codes
LEAST = {"mxfp4_weight_only": 100, "mxfp8": 20, "mxint8": 20}


def identity():
    """Return a layer whose products are its inputs, of all magnitudes whose scales are normal numbers."""
    layer = nn.Linear(64, 64, bias=False)
    nn.init.eye_(layer.weight)
    x = torch.randn(200, 64) * 2.0 ** torch.randint(-100, 120, (200, 1))
    x[0] = 0
    return layer, (x,)


def minilm():
    encoder, tokenize = load_minilm()
    return encoder, tokenize(["a cat sat on the mat", "blocks of numbers share a scale"])


def resnet18():
    models = pytest.importorskip("torchvision").models
    return models.resnet18(weights=None), (torch.randn(1, 3, 224, 224),)
