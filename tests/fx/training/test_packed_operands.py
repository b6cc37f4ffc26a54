"""Operators that read codes in training: what they keep for the backward pass, and the way back."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pt2mx import ops
from pt2mx.fx.graph.node import Dequantize
from pt2mx.fx.graph.qdq import spec_of_dequantize
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.fx.training.packed_operands import use_converted_operators, use_packed_operators
from pt2mx.ops import linear
from tests.compare import sqnr
from tests.flow import convert
from tests.models import IDS, Tied

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 64, 32, dtype=torch.bfloat16))

    def forward(self, x):
        return torch._grouped_mm(x, self.weight, offs=torch.tensor([3, 8], dtype=torch.int32))


MODELS = {"tied": (Tied, IDS), "experts": (Experts, X.bfloat16())}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4_weight_only"])
def test_there_and_back(name, recipe):
    kind, x = MODELS[name]
    converted = convert(kind().eval(), (x,), recipe)
    packed = copy_sharing_tensors(converted)
    use_packed_operators(packed)
    targets = {node.target for node in packed.graph.nodes}
    assert not targets & {torch.ops.aten.linear.default, torch.ops.aten.matmul.default, ops.quantize_mx}
    assert targets & {linear.linear_mx, linear.grouped_linear_mx}
    assert sqnr(packed(x), converted(x)) > (100 if x.dtype == torch.int64 else 40)
    back = copy_sharing_tensors(packed)
    use_converted_operators(back)
    assert torch.equal(back(x), converted(x))
    specs = [{str(spec_of_dequantize(node)) for node, _ in Dequantize.calls_in(m.graph)} for m in (back, converted)]
    assert specs[0] == specs[1]
    assert {node.target for node in back.graph.nodes}.isdisjoint((linear.linear_mx, linear.grouped_linear_mx))


def saved_floats(model, x):
    """Return the shapes of the floats that a call keeps for its backward pass."""
    shapes = []

    def pack(tensor):
        shapes.extend([tuple(tensor.shape)] if tensor.is_floating_point() else [])
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    y.sum().backward()
    return shapes


def test_no_float_weight_is_kept_for_the_backward_pass():
    x = X.clone().requires_grad_()
    converted = convert(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48)).eval(), (X,), "mxfp4")
    assert {frozenset(shape) for shape in saved_floats(converted, x)} >= {frozenset((96, 64)), frozenset((48, 96))}
    packed = copy_sharing_tensors(converted)
    use_packed_operators(packed)
    expected, x.grad = x.grad, None
    assert saved_floats(packed, x) == [(8, 96)]  # the input of GELU
    assert sqnr(x.grad, expected) > 100
