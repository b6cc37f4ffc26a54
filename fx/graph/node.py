"""Nodes of a graph: what is known of their values while nothing runs, and their arguments by name.

Values are the `val` meta of an exported graph, or the `example_value` of one that torch.compile traced.
`Quantize.of(node)` gives the arguments of a `quantize_mx` node, defaults too, and None for any other node. The tuple,
or a changed one made by `_replace`, can be the `args` of a node.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx import ops
from pt2mx.ops import linear
from pt2mx.spec import MXSpec

#: meta key of the call of a `TrainEvalModule`: the operator of which it is a form
OPERATOR_KEY = "mx_operator"


def value_of(node: object) -> object:
    """The fake tensor or symbolic size that stands for a node; None where there is none."""
    return node.meta.get("val", node.meta.get("example_value")) if isinstance(node, Node) else None


def dtype_of(node: object) -> torch.dtype | None:
    value = value_of(node)
    return value.dtype if isinstance(value, Tensor) else None


def shape_of(node: object) -> tuple | None:
    """The shape of a node's value. Symbolic sizes are given as text, so that comparing two shapes sets no guard."""
    value = value_of(node)
    return tuple(n if isinstance(n, int) else str(n) for n in value.shape) if isinstance(value, Tensor) else None


def set_value(node: Node) -> None:
    """Give a new node `val` meta, where its inputs have it: its operator run on theirs."""
    if all("val" in n.meta for n in node.all_input_nodes):
        node.meta["val"] = result_of(node)


def result_of(node: Node, given: dict[Node, object] | None = None) -> object:
    """A node's operator run on the values of its inputs, which are all known, or on what is `given` in their place."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: (given or {}).get(n, value_of(n)))
    fakes = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch._subclasses.FakeTensor)]
    with torch.no_grad(), fakes[0].fake_mode if fakes else nullcontext():
        return node.target(*args, **kwargs)


def args_of(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a call. Each has the type that the operator's schema gives it."""
    return node.args


def node_arg(node: Node, index: int = 0) -> Node:
    """The positional argument `index` of a call, where it is the result of another node."""
    argument = node.args[index]
    if not isinstance(argument, Node):
        raise TypeError(f"argument {index} of {node} is no node: {argument!r}")
    return argument


def make_positional(node: Node, count: int = 0) -> None:
    """Move keyword arguments of an operator's call to their positions, as far as the schema has them there, and write
    out the defaults of the first `count`. A higher-order operator has no schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    arguments = [a for a in node.target._schema.arguments if not a.kwarg_only]
    args, kwargs = list(node.args), dict(node.kwargs)
    last = max((i for i, a in enumerate(arguments) if a.name in kwargs), default=-1)
    for argument in arguments[len(args) : max(last + 1, count)]:
        args.append(kwargs.pop(argument.name, argument.default_value))
    node.args, node.kwargs = tuple(args), kwargs


def write_out_arguments(model: GraphModule) -> None:
    """Write out all arguments of pt2mx's operators: a saved graph means the same when a default has become another.

    Tracing (`torch.export.export`, `run_decompositions`) leaves out those that are defaults.
    """
    for node in model.graph.nodes:
        if is_ours(node):
            make_positional(node, len(node.target._schema.arguments))
    model.recompile()


def is_ours(node: Node) -> bool:
    """Whether a node calls an operator of pt2mx."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "pt2mx"


def called(node: Node) -> object:
    """The operator that a node calls, also in the form of a `TrainEvalModule`; None for other nodes."""
    return node.target if node.op == "call_function" else node.meta.get(OPERATOR_KEY)


class Quantize(NamedTuple):
    """Arguments of `quantize_mx`. x: (..., n, ...); axis: as it was written, also from the end."""

    x: Node
    element: str
    block_size: int
    axis: int
    scale_mode: str
    rounding: str
    seed: object

    @classmethod
    def of(cls, node: Node) -> Quantize | None:
        return cls(*_arguments(node)) if node.target is ops.quantize_mx else None

    @property
    def spec(self) -> MXSpec:
        return MXSpec(self.element, self.block_size, self.axis, self.scale_mode, self.rounding)


class FakeQuantize(NamedTuple):
    """Arguments of `fake_quantize_mx`: those of `quantize_mx` and what becomes of the gradient."""

    x: Node
    element: str
    block_size: int
    axis: int
    scale_mode: str
    rounding: str
    seed: object
    ste: str

    @classmethod
    def of(cls, node: Node) -> FakeQuantize | None:
        return cls(*_arguments(node)) if node.target is ops.fake_quantize_mx else None


class Dequantize(NamedTuple):
    """Arguments of `dequantize_mx`. codes and scale: uint8, as `quantize_mx` gives them; length: n, or None for all
    codes."""

    codes: Node
    scale: Node
    element: str
    block_size: int
    dtype: torch.dtype
    axis: int
    length: object

    @classmethod
    def of(cls, node: Node) -> Dequantize | None:
        return cls(*_arguments(node)) if node.target is ops.dequantize_mx else None


class LinearMX(NamedTuple):
    """Arguments of `linear_mx`. x: (..., K), codes and scale: of a weight (N, K), bias: (N,) or None."""

    x: Node
    codes: Node
    scale: Node
    bias: Node | None
    element: str
    block_size: int

    @classmethod
    def of(cls, node: Node) -> LinearMX | None:
        return cls(*_arguments(node)) if node.target is linear.linear_mx else None


def _arguments(node: Node) -> tuple:
    """All arguments of a call, in the order of the schema."""
    arguments = node.target._schema.arguments
    given = {a.name: value for a, value in zip(arguments, node.args, strict=False)} | node.kwargs
    return tuple(given.get(a.name, a.default_value) for a in arguments)
