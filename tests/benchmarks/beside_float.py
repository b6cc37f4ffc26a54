"""`pt2mx compare --speed` by the time of the processor, which other processes change less than they change the clock.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.beside_float [MODEL ...]

By default: a CNN of 32 to 128 channels with random weights and 8 images of 64x64, ResNet-18 (random weights, 2 images)
and MiniLM (12 sentences). By the clock, for the CNN: `pt2mx compare tests/benchmarks/beside_float.py:make --speed`.
"""

import itertools
import sys
import time
from functools import partialmethod

import torch
from torch import Tensor, nn

from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.report.speed import SpeedTest

RECIPES = "mxint8,mxfp4,mxfp8,mxfp4_weight_only"
MODELS = (f"{__file__}:make", "torchvision:resnet18", "minilm")


def make() -> tuple[nn.Module, tuple[Tensor]]:
    """Return the CNN and its images."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise((3, 32, 64, 128, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10)).eval(), (torch.randn(8, 3, 64, 64),)


if __name__ == "__main__":
    SpeedTest.run = partialmethod(SpeedTest.run, clock=time.process_time)
    for model in sys.argv[1:] or MODELS:
        main(["compare", model, "--recipes", RECIPES, "--speed"])
