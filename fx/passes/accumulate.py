"""Calls of torch's operators as calls of the accumulated ones (`pt2mx.ops.accumulated`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.fx.graph.convolution import CONVOLUTIONS
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import shape_of
from pt2mx.ops.accumulated import (
    ACCUMULATED,
    AttentionAccumulated,
    ConvolutionAccumulated,
    LinearAccumulated,
    MatmulAccumulated,
)
from pt2mx.ops.operator import Operator

#: the arguments of a call by name
_Args = dict[str, Any]


def accumulated_call(
    target: object, args: Sequence[Any], kwargs: Mapping[str, Any], accumulator: str
) -> Operator[Node] | None:
    """Return the accumulated call that computes what a call of `target` computes.

    None for another operator, and where the accumulated one lacks an option: matmuls of vectors, factors of `addmm`
    other than 1, padding by name, transposed convolutions, dropout.
    """
    build = _BUILD.get(target)
    if build is None:
        return None
    schema = cast(OpOverload, target)._schema.arguments
    passed = dict(zip((argument.name for argument in schema), args, strict=False)) | dict(kwargs)
    return build({a.name: passed.get(a.name, a.default_value) for a in schema}, accumulator)


def refuse_accumulators(model: GraphModule, where: str) -> None:
    """Raise an MXError for an accumulated operator, of a graph or its subgraphs; `where` says what has none."""
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            if node.target in ACCUMULATED:
                raise MXError(
                    f"{node.name} adds its products in {node.args[-1]}, and {where} have no accumulators: prepare the "
                    "model without accumulator="
                )


def _linear(args: _Args, accumulator: str) -> Operator[Node]:
    return LinearAccumulated(args["input"], args["weight"], args["bias"], accumulator)


def _matmul(x: str, other: str, bias: str = "") -> Callable[[_Args, str], Operator[Node] | None]:
    def build(args: _Args, accumulator: str) -> Operator[Node] | None:
        plain = args.get("alpha", 1) == args.get("beta", 1) == 1
        if not plain or any(len(shape_of(args[name]) or ()) < 2 for name in (x, other)):
            return None
        return MatmulAccumulated(args[x], args[other], args.get(bias), accumulator)

    return build


def _convolution(args: _Args, accumulator: str) -> Operator[Node] | None:
    if args.get("transposed") or isinstance(args["padding"], str):
        return None
    dimensions = len(shape_of(args["weight"]) or ()) - 2
    stride, padding, dilation = (
        list(args[name]) * (dimensions if len(args[name]) == 1 else 1) for name in ("stride", "padding", "dilation")
    )
    layer = args["input"], args["weight"], args["bias"]
    return ConvolutionAccumulated(*layer, stride, padding, dilation, args["groups"], accumulator)


def _attention(args: _Args, accumulator: str) -> Operator[Node] | None:
    if args["dropout_p"]:
        return None
    tensors = args["query"], args["key"], args["value"], args["attn_mask"]
    return AttentionAccumulated(*tensors, args["is_causal"], args["scale"], args["enable_gqa"], accumulator)


aten = torch.ops.aten
#: operator -> the function of its arguments and the accumulator that returns the accumulated call
_BUILD: dict[object, Callable[[_Args, str], Operator[Node] | None]] = {
    aten.linear.default: _linear,
    **dict.fromkeys((aten.mm.default, aten.bmm.default), _matmul("self", "mat2")),
    **dict.fromkeys((aten.matmul.default, aten.linalg_matmul.default), _matmul("self", "other")),
    aten.addmm.default: _matmul("mat1", "mat2", "self"),
    aten.baddbmm.default: _matmul("batch1", "batch2", "self"),
    **dict.fromkeys((target for target, kind in CONVOLUTIONS.items() if not kind.transposed), _convolution),
    aten.convolution.default: _convolution,
    aten.scaled_dot_product_attention.default: _attention,
}
