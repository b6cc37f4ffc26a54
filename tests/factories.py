"""A file of a user, with functions that the command line calls."""

FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 10))
    return model, torch.randn(32, 64), ({0: torch.export.Dim("batch")},)

def broken():
    model, x, _ = make()
    model[0].weight.data[0, 0] = float("nan")
    return model, x

def text():
    return nn.Identity(), torch.ones(2)
"""
