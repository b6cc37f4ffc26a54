"""Insert faults into converted models, as bugs of a flow would."""

import copy

import torch
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.node import named_args
from pt2mx.fx.graph.source_node import module_name


def scaled_weight(converted: GraphModule, module: str, factor: float = 1.5) -> GraphModule:
    """Return the model with a module's weight scaled after quantization."""
    broken, weight = _weight(converted, module)
    with broken.graph.inserting_after(weight):
        larger = broken.graph.call_function(torch.ops.aten.mul.Tensor, (weight, factor))
    weight.replace_all_uses_with(larger, delete_user_cb=lambda user: user is not larger)
    broken.recompile()
    return broken


def turned_scales(converted: GraphModule, module: str) -> GraphModule:
    """Return the model with the scales of a module's square weight along the wrong axis: blocks of 8-bit codes run down
    the columns instead of along the rows."""
    broken, weight = _weight(converted, module)
    named = named_args(weight)
    with broken.graph.inserting_before(weight):
        scale = broken.graph.call_function(torch.ops.aten.transpose.int, (named["shared_exp_e8m0"], 0, 1))
    weight.args, weight.kwargs = (
        (named["data_lp"], scale),
        {
            **{name: value for name, value in named.items() if name not in ("data_lp", "shared_exp_e8m0")},
            "block_dim": 0,
        },
    )
    broken.recompile()
    return broken


def _weight(converted: GraphModule, module: str) -> tuple[GraphModule, Node]:
    """Return a copy of a model, and its node that dequantizes a module's first weight."""
    broken = copy.deepcopy(converted)
    dequantized = broken.graph.find_nodes(op="call_function", target=ops.dequantize_mx)
    read = [n for n in dequantized if n.args[0].op == "get_attr" and any(module_name(u) == module for u in n.users)]
    return broken, read[0]
