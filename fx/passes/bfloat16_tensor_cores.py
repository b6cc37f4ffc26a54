"""Multiply quantized float32 activations on a GPU's tensor cores for bfloat16, with a float32 result."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.formats import ELEMENTS
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import graph_pass
from pt2mx.fx.graph.node import GroupedLinearMX, LinearMX, set_value, tensor_of, value_of
from pt2mx.fx.passes.bf16_matmul import QUANTIZED, is_quantized
from pt2mx.ops import dequantize_mx

aten = torch.ops.aten

_Matmul = LinearMX | GroupedLinearMX

#: smallest scale byte (E8M0) for which bfloat16 represents all values of every 8-bit element: 2**-133 for the 2**-16 of
#: E5M2
_LEAST_SCALE = 127 - 133 + 16


@graph_pass((LinearMX, GroupedLinearMX), QUANTIZED)
def use_bfloat16_tensor_cores(model: GraphModule, force: bool = False) -> None:
    """Pass the quantized x of a float32 `linear_mx` or `grouped_linear_mx` on a GPU in bfloat16, and keep the result in
    float32.

    Tensor cores multiply bfloat16 ten times as fast as float32, and sum in float32.

    bfloat16 represents the values of x and of the weight, except values of x below 2**-133. The pass skips weights with
    values below 2**-133, and weights that are not constant.

    Args:
        force: True runs the pass on every device, for tests.
    """
    constants = constant_nodes(model.graph)
    values: dict[Node, Node] = {}
    matmuls: list[tuple[Node, _Matmul]] = [
        *LinearMX.calls_in(model.graph),
        *GroupedLinearMX.calls_in(model.graph),
    ]
    for node, call in matmuls:
        if call.target_dtype is not None or not is_quantized(call.x) or not _fits(node, call, force):
            continue
        if isinstance(call, LinearMX) and call.rotation:
            continue
        if any(n not in constants or n.op != "get_attr" for n in (call.codes, call.scale)):
            continue
        if not _holds(call, tensor_of(model, call.codes), tensor_of(model, call.scale)):
            continue
        if call.x not in values:
            with model.graph.inserting_after(call.x):
                values[call.x] = model.graph.call_function(aten.to.dtype, (call.x, torch.bfloat16))
            set_value(values[call.x])
        node.args = call.replace(x=values[call.x], target_dtype=torch.float32).args


def _holds(call: _Matmul, codes: Tensor, scale: Tensor) -> bool:
    """Return whether bfloat16 represents every value of a weight."""
    small = (scale < _LEAST_SCALE).any(-1)
    length = value_of(call.x).shape[-1]
    values = dequantize_mx(codes[small], scale[small], call.element, call.block_size, torch.float32, -1, length)
    return torch.equal(values, values.to(torch.bfloat16).to(torch.float32))


def _fits(node: Node, call: _Matmul, force: bool) -> bool:
    value = value_of(node)
    if value is None or value.dtype != torch.float32 or ELEMENTS[call.element].is_wide:
        return False
    return force or (value.device.type == "cuda" and torch.cuda.get_device_capability(value.device) >= (8, 0))
