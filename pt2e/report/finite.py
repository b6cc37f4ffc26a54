"""Find NaN and Inf in quantized tensors: a block that holds one becomes NaN as a whole."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import model_of, name_of, node_arg, tensor_of
from pt2mx.fx.graph.source_node import module_name
from pt2mx.kernels.elements import NAN_SCALE
from pt2mx.pt2e.observer import STATISTICS_KEY
from pt2mx.pt2e.packed_weights import parameter_name, stored_weights
from pt2mx.pt2e.torchao_pt2e import is_fake

#: most names that are shown
_SHOWN = 5


def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Return the names of the floating-point parameters that hold a NaN or an Inf."""
    return [name for name, p in model.named_parameters() if p.is_floating_point() and not p.isfinite().all()]


def nonfinite_weights(converted: GraphModule) -> list[str]:
    """Return the names of the weights of a converted model that held a NaN or an Inf."""
    weights = [(codes, scales) for codes, scales, _ in stored_weights(converted)]
    folded = [parameter_name(name_of(codes)) for codes, scales in weights if _holds_nan_blocks(scales)]
    kept = [str(x.target) for x, _ in _nonfinite_pairs(converted) if x.op == "get_attr"]
    return list(dict.fromkeys([*folded, *kept]))


def nonfinite_operands(converted: GraphModule) -> list[str]:
    """Return the operands of a converted model that held a NaN or an Inf, as far as calibration saw them.

    Weights are named by their parameters, other operands by their operators' modules.
    """
    computed = [dequantize for x, dequantize in _nonfinite_pairs(converted) if x.op != "get_attr"]
    modules = [module_name(node) or next(iter(node.users)).name for node in computed]
    return list(dict.fromkeys([*nonfinite_weights(converted), *(f"an operand of {name}" for name in modules)]))


def listed(names: list[str]) -> str:
    """Return the names as text; only the first few of many."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _nonfinite_pairs(converted: GraphModule) -> Iterator[tuple[Node, Node]]:
    """Yield (quantized node, its `dequantize_mx`) where calibration saw a NaN or an Inf, without folded weights."""
    for graph in graph_modules(converted):
        for node in graph.graph.find_nodes(op="call_function", target=ops.dequantize_mx):
            seen, scale = node.meta.get(STATISTICS_KEY), node_arg(node, 1)
            if seen is not None and seen.nonfinite and scale.target is operator.getitem:
                yield node_arg(node_arg(scale)), node


def _holds_nan_blocks(scales: Node) -> bool:
    scale = tensor_of(model_of(scales.graph), scales)
    return not is_fake(scale) and bool((scale == NAN_SCALE).any())
