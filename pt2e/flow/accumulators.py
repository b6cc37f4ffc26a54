"""Accumulators of a config in the prepared and in the converted model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.node import (
    OPERATOR_KEY,
    args_of,
    called,
    called_module,
    insert_call,
    make_positional,
    name_of,
    operator_of,
)
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.fx.passes.accumulate import accumulated_call
from pt2mx.fx.training.fuse_batch_norm import NormalizedLayer
from pt2mx.fx.training.train_eval import replace_by_module
from pt2mx.ops.accumulated import ACCUMULATED
from pt2mx.ops.operator import Operator
from pt2mx.pt2e.observe.accumulator import SUMS_KEY, MXAccumulator
from pt2mx.pt2e.quantizer.annotate import REMARK_KEY
from pt2mx.pt2e.quantizer.operators import CONFIG_KEY, quantizable_operators, reduces

#: a layer's input, weight and bias
_LAYER = 3
_UNSUPPORTED = "sums in float32: pt2mx has no accumulator for this call"


def insert_accumulators(model: GraphModule, for_training: bool) -> None:
    """Replace each operator whose config names an accumulator by an `MXAccumulator`. A remark names operators that keep
    torch's sums."""
    for node, call in _accumulated_calls(model):
        if call is None:
            node.meta[REMARK_KEY] = "; ".join(filter(None, [node.meta.get(REMARK_KEY), _UNSUPPORTED]))
            continue
        layer = _layer(node)
        places = {i: args_of(node).index(arg) for i, arg in enumerate(call.args) if isinstance(arg, Node)}
        if layer is not None:  # in evaluation it has a bias where the node has none
            places = {i: i for i in range(_LAYER)}
        operator = operator_of(node) if layer is None else layer.operator
        switches = {"fake_quant": for_training, "observe": not for_training}
        module = MXAccumulator(operator, call.overload, call.args, places, **switches)
        if layer is not None:
            layer.accumulator = module
            continue
        meta = {**node.meta, OPERATOR_KEY: operator}
        sums = replace_by_module(node, f"{node.name}_accumulator", module, node.args, meta)
        sums.kwargs = node.kwargs


def remove_accumulators(model: GraphModule) -> None:
    """Remove every `MXAccumulator`, and keep what it found in the meta of its operator."""
    for node in list(model.graph.find_nodes(op="call_module")):
        layer, module = _layer(node), called_module(node)
        if layer is not None and isinstance(layer.accumulator, MXAccumulator):
            node.meta[SUMS_KEY], layer.accumulator = layer.accumulator.sqnr, None
        elif isinstance(module, MXAccumulator):
            with model.graph.inserting_before(node):
                plain = model.graph.call_function(module.operator, node.args, node.kwargs)
            plain.meta[SUMS_KEY] = module.sqnr
            replace_node(node, plain, OPERATOR_KEY)
            model.delete_submodule(name_of(node))


def convert_accumulators(model: GraphModule) -> None:
    """Replace each operator whose config names an accumulator by the accumulated one."""
    for node, call in _accumulated_calls(model):
        if call is not None:
            sums = insert_call(node, call)
            replace_node(node, sums)


def accumulator_of(node: Node) -> dict[str, Any]:
    """Return the accumulator of an operator of a prepared or converted model, as fields of a row of the report."""
    if node.target in ACCUMULATED:
        return {"accumulator": node.args[-1], "sums_sqnr": node.meta.get(SUMS_KEY)}
    layer = _layer(node)
    module = called_module(node) if layer is None else layer.accumulator
    if not isinstance(module, MXAccumulator):
        return {}
    return {"accumulator": module.spelling, "sums_sqnr": module.sqnr}


def _accumulated_calls(model: GraphModule) -> Iterator[tuple[Node, Operator[Node] | None]]:
    """Yield each operator whose config names an accumulator, and the accumulated call; None where there is none. The
    node may be replaced before the next one."""
    for node in list(quantizable_operators(model.graph)):
        config = node.meta.get(CONFIG_KEY)
        if config is not None and config.accumulator is not None and reduces(node):
            layer = _layer(node)
            make_positional(node)
            args = args_of(node) if layer is None else (*args_of(node)[:_LAYER], *layer.layer_args)
            yield node, accumulated_call(called(node), args, node.kwargs, str(config.accumulator))


def _layer(node: Node) -> NormalizedLayer | None:
    """Return the layer before a batch norm that a node of a model in training calls."""
    module = called_module(node)
    return module if isinstance(module, NormalizedLayer) else None
