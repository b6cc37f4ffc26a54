"""`MXTensor`s of random values."""

import torch
from torch import nn

from pt2mx import MXTensor


def mx(*shape: int, elem: str = "fp8_e4m3", dtype=torch.float32, **fields) -> MXTensor:
    return MXTensor.to_mx(torch.randn(shape, dtype=dtype), elem, **fields)


def same(a: MXTensor, b: MXTensor) -> bool:
    """Return whether codes, scales and the fields that describe them are equal."""
    parts = [torch.equal(part, b.parts[name]) for name, part in a.parts.items()]
    return all(parts) and a.parts.keys() == b.parts.keys() and (a.spec, a.shape, a.dtype) == (b.spec, b.shape, b.dtype)


def parameter_model(elem: str = "mxfp4") -> nn.Module:
    """For (B, 70); the weight of the first of two layers is an `MXTensor`."""
    model = nn.Sequential(nn.Linear(70, 8), nn.Linear(8, 3))
    model[0].weight = nn.Parameter(MXTensor.to_mx(model[0].weight.detach(), elem), requires_grad=False)
    return model
