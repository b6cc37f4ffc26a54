"""A small CNN of 32 to 128 channels with random weights, for `pt2mx compare tests/benchmarks/cnn.py:make --speed`."""

import itertools

import torch
from torch import Tensor, nn


def make() -> tuple[nn.Module, tuple[Tensor]]:
    """Return the model and 8 images of 64x64."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = (3, 32, 64, 128, 128)
    for inputs, outputs in itertools.pairwise(channels):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10)).eval(), (torch.randn(8, 3, 64, 64),)
