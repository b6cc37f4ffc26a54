"""Accumulators of a config in the prepared and in the converted model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from pt2mx.fx.graph.node import (
    args_of,
    called,
    called_module,
    inherit_location,
    insert_call,
    name_of,
    node_arg,
)
from pt2mx.fx.graph.tensors import replace_node
from pt2mx.fx.passes.accumulate import accumulated_call
from pt2mx.fx.training.fuse_batch_norm import NormalizedLayer
from pt2mx.fx.training.train_eval import insert_module
from pt2mx.ops.accumulated import ACCUMULATED
from pt2mx.ops.operator import Operator
from pt2mx.pt2e.observe.accumulator import SUMS_KEY, MXAccumulator
from pt2mx.pt2e.quantizer.annotate import REMARK_KEY
from pt2mx.pt2e.quantizer.operators import CONFIG_KEY, quantizable_operators, reduces

_UNSUPPORTED = "sums in float32: pt2mx has no accumulator for this call"


def insert_accumulators(model: GraphModule, for_training: bool) -> None:
    """Insert an `MXAccumulator` after each operator whose config names an accumulator; it gets the operator's result
    and arguments. Operators that keep torch's sums get a remark, and lose the accumulator of their config: conversion,
    which sees no dropout any more, leaves them alone."""
    for node, call in _accumulated_calls(model):
        if call is None:
            node.meta[REMARK_KEY] = "; ".join(filter(None, [node.meta.get(REMARK_KEY), _UNSUPPORTED]))
            node.meta[CONFIG_KEY] = replace(node.meta[CONFIG_KEY], accumulator=None)
            continue
        layer = _layer(node)
        tensors = call.args[: -1 if layer is None else 3]
        rest = call.args[len(tensors) :]
        module = MXAccumulator(call.overload, rest, fake_quant=for_training, observe=not for_training)
        if layer is not None:
            layer.accumulator = module
            continue
        users = list(node.users)
        sums = insert_module(node.next, f"{node.name}_accumulator", module, (node, *tensors), {})
        inherit_location(sums, node)
        sums.meta["val"] = node.meta.get("val")
        for user in users:
            user.replace_input_with(node, sums)


def remove_accumulators(model: GraphModule) -> None:
    """Remove every `MXAccumulator`, and keep what it found in the meta of its operator."""
    for node in list(model.graph.find_nodes(op="call_module")):
        layer, module = _layer(node), called_module(node)
        if layer is not None and isinstance(layer.accumulator, MXAccumulator):
            node.meta[SUMS_KEY], layer.accumulator = layer.accumulator.sqnr, None
        elif isinstance(module, MXAccumulator):
            floats = node_arg(node)
            floats.meta[SUMS_KEY] = module.sqnr
            node.replace_all_uses_with(floats)
            model.graph.erase_node(node)
            model.delete_submodule(name_of(node))


def convert_accumulators(model: GraphModule) -> None:
    """Replace each operator whose config names an accumulator by the accumulated one."""
    for node, call in list(_accumulated_calls(model)):
        if call is not None:
            sums = insert_call(node, call)
            replace_node(node, sums)


def accumulator_of(node: Node) -> dict[str, Any]:
    """Return the accumulator of an operator of a prepared or converted model, as fields of a row of the report."""
    if node.target in ACCUMULATED:
        return {"accumulator": node.args[-1], "sums_sqnr": node.meta.get(SUMS_KEY)}
    layer = _layer(node)
    module = layer.accumulator if layer is not None else next(map(called_module, node.users), None)
    if not isinstance(module, MXAccumulator):
        return {}
    return {"accumulator": module.spelling, "sums_sqnr": module.sqnr}


def _accumulated_calls(model: GraphModule) -> Iterator[tuple[Node, Operator[Node] | None]]:
    """Yield each operator whose config names an accumulator, and the accumulated call; None where there is none."""
    for node in quantizable_operators(model.graph):
        config = node.meta.get(CONFIG_KEY)
        if config is not None and config.accumulator is not None and reduces(node):
            layer = _layer(node)
            args = args_of(node) if layer is None else (*args_of(node)[:3], *layer.layer_args)
            yield node, accumulated_call(called(node), args, node.kwargs, str(config.accumulator))


def _layer(node: Node) -> NormalizedLayer | None:
    """Return the layer before a batch norm that a node of a model in training calls."""
    module = called_module(node)
    return module if isinstance(module, NormalizedLayer) else None
