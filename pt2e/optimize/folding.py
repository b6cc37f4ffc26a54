"""Fold channel factors into the parameters before a tensor, if the graph proves that nothing else changes.

A factor has the rank of its node; each dimension is 1 or the node's. The folder propagates it from a node back to the
parameters before it, such as the scale of a norm or the rows of a linear layer. Each node on the way must have one
user, and scaling its input must scale its result. For powers of two this is exact, except for values that overflow or
become subnormal. A parameter that would lose precision this way gets no factor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.node import args_of, dtype_of, named_args, shape_of, tensor_of
from pt2mx.fx.graph.tensors import replace_tensor
from pt2mx.ops.checks import HIGH_PRECISION

aten = torch.ops.aten


class Scaled(NamedTuple):
    """A node whose value is to be multiplied by a factor that broadcasts to it."""

    node: Node
    factor: Tensor


#: alternatives for scaling a node's result, each a list of nodes to scale instead
_Ways = list[list[Scaled]]


class Folder:
    """Folds factors into parameters that the graph does not write."""

    def __init__(self, model: GraphModule, in_place: bool = False) -> None:
        self.model, self.in_place, self.written = model, in_place, written_nodes(model.graph)
        values = {node: id(_tensor(model, node)) for node in model.graph.find_nodes(op="get_attr")}
        reads: Counter[int] = Counter()
        for node, value in values.items():
            reads[value] += _reads(node)
        #: parameter node -> number of reads of the parameter, under any name
        self.reads = {node: reads[value] for node, value in values.items()}

    def fold(self, node: Node, factor: Tensor) -> list[str]:
        """Multiply a node's value by a factor of its last dimension, (K,), by changing parameters.

        Returns the names of these parameters, none where folding is impossible.
        """
        shape = shape_of(node)
        if shape is None or node in self.written:
            return []
        edits = self._edits(Scaled(node, factor.reshape((1,) * (len(shape) - 1) + factor.shape)))
        scaled: list[tuple[Tensor, Tensor]] = []
        for parameter, change in edits or []:
            value = tensor_of(self.model, parameter)
            new = _scaled(value, change)
            if new is None:
                return []
            scaled.append((value, new))
        for value, new in scaled:
            replace_tensor(self.model, value, new, self.in_place)
        return [str(parameter.target) for parameter, _ in edits or []]

    def _edits(self, scaled: Scaled) -> list[Scaled] | None:
        """Return the parameters to scale instead of a node; None where that is impossible."""
        node, factor = scaled
        if node in self.written:
            return None
        if node.op == "get_attr":
            return self._parameter(node, factor)
        if not _broadcasts(factor, shape_of(node) or ()):
            return None
        for way in _WAYS[node.target](node, factor) if node.target in _WAYS else []:
            if any(_reads(part.node) != 1 for part in way if part.node.op != "get_attr"):
                continue
            parts = [self._edits(part) for part in way]
            if all(edits is not None for edits in parts):
                return [edit for edits in parts for edit in edits or []]
        return None

    def _parameter(self, node: Node, factor: Tensor) -> list[Scaled] | None:
        value = _tensor(self.model, node)
        if value is None or not value.is_floating_point() or self.reads.get(node) != 1:
            return None
        if factor.shape[: max(factor.dim() - value.dim(), 0)].numel() != 1:
            return None
        factor = factor.reshape(factor.shape[-value.dim() :]) if value.dim() else factor.reshape(())
        fits = all(f in (1, v) for f, v in zip(reversed(factor.shape), reversed(value.shape), strict=False))
        return [Scaled(node, factor)] if fits else None


def _scaled(value: Tensor, factor: Tensor) -> Tensor | None:
    """Return a parameter times a factor that broadcasts to it; None if that loses precision.

    Values that overflow or become subnormal may lose at most the square of the dtype's precision, relative to the
    largest value with the same factor.
    """
    scaled = value * factor.to(value.dtype)
    lost = (scaled.double() / factor.double() - value.double()).abs()
    shared = [i - factor.dim() for i, n in enumerate(factor.shape) if n == 1]  # dimensions with one factor
    shared = [*range(-value.dim(), -factor.dim()), *shared]
    lost, largest = (x.amax(shared) if shared else x for x in (lost, value.double().abs()))
    return scaled if bool((lost <= torch.finfo(value.dtype).eps ** 2 * largest).all()) else None


def _tensor(model: GraphModule, node: Node) -> Tensor | None:
    try:
        return tensor_of(model, node)
    except TypeError:  # a subgraph
        return None


def _reads(node: Node) -> int:
    """Count how often a graph reads a node; `x @ x` counts twice."""
    return sum(pytree.tree_leaves((user.args, user.kwargs)).count(node) for user in node.users)


def _broadcasts(factor: Tensor, shape: tuple[int | str, ...]) -> bool:
    return factor.dim() == len(shape) and all(f in (1, n) for f, n in zip(factor.shape, shape, strict=True))


def _same(node: Node, factor: Tensor) -> _Ways:
    """Scale the first argument. The result is that argument, or zero where it is negative."""
    return [[Scaled(node.all_input_nodes[0], factor)]]


def _cast(node: Node, factor: Tensor) -> _Ways:
    """Scale the argument of a cast, except to integers or 8 bits, whose rounding steps do not scale."""
    dtypes = {dtype_of(node), dtype_of(node.all_input_nodes[0])}
    return _same(node, factor) if dtypes <= set(HIGH_PRECISION) else []


def _dropout(node: Node, factor: Tensor) -> _Ways:
    return [] if named_args(node)["train"] else _same(node, factor)


def _view(node: Node, factor: Tensor) -> _Ways:
    before, after = shape_of(node.all_input_nodes[0]) or (), shape_of(node) or ()
    first = next((i for i, n in enumerate(factor.shape) if n != 1), factor.dim())
    tail = _static(after[first:])
    for i in range(len(before) + 1):
        same = _static(before[i:])
        if tail is not None and same is not None and math.prod(same) == math.prod(tail):
            whole = factor.reshape(factor.shape[first:]).expand(tail)
            return [[Scaled(node.all_input_nodes[0], whole.reshape((1,) * i + same))]]
    return []


def _static(shape: tuple[int | str, ...]) -> tuple[int, ...] | None:
    known = tuple(n for n in shape if isinstance(n, int))
    return known if len(known) == len(shape) else None


def _transpose(node: Node, factor: Tensor) -> _Ways:
    source, *dims = args_of(node)
    return [[Scaled(source, factor.transpose(*dims))]]


def _permute(node: Node, factor: Tensor) -> _Ways:
    source, dims = args_of(node)
    order = [dim % factor.dim() for dim in dims]
    return [[Scaled(source, factor.permute([order.index(i) for i in range(len(order))]))]]


def _mul(node: Node, factor: Tensor) -> _Ways:
    """Scale one of the two operands, a parameter if possible."""
    operands = [x for x in args_of(node)[:2] if isinstance(x, Node)]
    if len(set(operands)) < 2:
        return []
    operands.sort(key=lambda x: x.op != "get_attr")
    return [[Scaled(x, factor)] for x in operands]


def _norm(node: Node, factor: Tensor) -> _Ways:
    args = named_args(node)
    dims = len(args["normalized_shape"])
    parameters = [args["weight"], *([args["bias"]] if args.get("bias") is not None else [])]
    if args["weight"] is None or factor.shape[:-dims].numel() != 1:
        return []
    return [[Scaled(parameter, factor.reshape(factor.shape[-dims:])) for parameter in parameters]]


def _rows(node: Node, factor: Tensor) -> _Ways:
    """x @ W.T + b: scale the rows of W, and b."""
    args = named_args(node)
    return _weight_and_bias(args["weight"], (-1, 1), args["bias"], factor)


def _columns(node: Node, factor: Tensor) -> _Ways:
    """b + x @ W: scale the columns of W, and b."""
    args = named_args(node)
    if (args["beta"], args["alpha"]) != (1, 1):
        return []
    return _weight_and_bias(args["mat2"], (1, -1), args["self"], factor)


def _weight_and_bias(weight: Node, shape: tuple[int, int], bias: Node | None, factor: Tensor) -> _Ways:
    if weight.op != "get_attr" or factor.numel() != factor.shape[-1]:
        return []
    vector = factor.reshape(-1)
    return [[Scaled(weight, vector.reshape(shape)), *([] if bias is None else [Scaled(bias, vector)])]]


def _attention(node: Node, factor: Tensor) -> _Ways:
    """Scale the values: each result is a sum of them along the second-last dimension."""
    value = args_of(node)[2]
    return _second(value, shape_of(node) or (), factor)


def _matmul(node: Node, factor: Tensor) -> _Ways:
    return _second(args_of(node)[1], shape_of(node) or (), factor)


def _second(value: Node, shape: tuple[int | str, ...], factor: Tensor) -> _Ways:
    """Scale the second factor of a matmul, if its other dimensions are dimensions of the result."""
    before = shape_of(value) or ()
    same = len(before) == len(shape) and before[:-2] == shape[:-2] and before[-1:] == shape[-1:]
    return [[Scaled(value, factor)]] if same and len(before) >= 2 and factor.shape[-2] == 1 else []


#: operator -> the alternatives for scaling its result
_WAYS: dict[object, Callable[[Node, Tensor], _Ways]] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int), _view),
    **dict.fromkeys((aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default), _same),
    **dict.fromkeys((aten.to.dtype, aten._to_copy.default), _cast),
    aten.relu.default: _same,
    aten.flatten.using_ints: _view,
    aten.dropout.default: _dropout,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.mul.Tensor: _mul,
    aten.layer_norm.default: _norm,
    aten.rms_norm.default: _norm,
    aten.linear.default: _rows,
    aten.addmm.default: _columns,
    aten.scaled_dot_product_attention.default: _attention,
    aten.matmul.default: _matmul,
    aten.bmm.default: _matmul,
}
