"""Products of quantized float32 activations on a GPU's tensor cores for bfloat16, with a float32 result."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from pt2mx.formats import ELEMENTS
from pt2mx.fx.graph.attributes import tensor_of
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.node import LinearMX, set_value, value_of
from pt2mx.fx.passes.bfloat16_products import is_quantized

aten = torch.ops.aten

#: the least scale of a weight, E8M0, with which a bfloat16 holds the least value of each element of 8 bits: 2**-16 of
#: E5M2 is 2**-133
_LEAST_SCALE = 127 - 133 + 16


@GraphPass
def use_bfloat16_tensor_cores(model: GraphModule, force: bool = False) -> None:
    """Give a float32 `linear_mx` on a GPU its x in bfloat16, where a quantization gives x, and keep its result in
    float32: on tensor cores, which sum in float32, it takes a tenth of the time of float32.

    A bfloat16 holds the values of both, but for those of x below 2**-133. Weights with smaller scales than it holds,
    or that are no constants, stay as they are.

    Args:
        force: on every device. For tests.
    """
    constants = constant_nodes(model.graph)
    values: dict[Node, Node] = {}
    for node, call in LinearMX.calls_in(model.graph):
        if call.rotation or call.target_dtype is not None or not is_quantized(call.x) or not _fits(node, call, force):
            continue
        if call.scale not in constants or call.scale.op != "get_attr":
            continue
        if bool((tensor_of(model, call.scale) < _LEAST_SCALE).any()):
            continue
        if call.x not in values:
            with model.graph.inserting_after(call.x):
                values[call.x] = model.graph.call_function(aten.to.dtype, (call.x, torch.bfloat16))
            set_value(values[call.x])
        node.args = replace(call, x=values[call.x], target_dtype=torch.float32).args


def _fits(node: Node, call: LinearMX, force: bool) -> bool:
    value = value_of(node)
    if value is None or value.dtype != torch.float32 or ELEMENTS[call.element].is_wide:
        return False
    return force or (value.device.type == "cuda" and torch.cuda.get_device_capability(value.device) >= (8, 0))
