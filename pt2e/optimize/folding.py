"""Factors of channels folded into what computes a tensor, where the graph proves that nothing else changes.

A factor has a node's rank; its dimensions are 1 or the node's. It is taken from a node back to the weights before it:
the scale of a norm, the rows of a linear layer. Each node on the way has one reader, and gives the factor's multiple
where it gets it. Of a power of two all this is exact, save in values that overflow or become subnormal: a parameter in
which that would show takes none.
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
from pt2mx.fx.graph.attributes import tensor_of
from pt2mx.fx.graph.node import args_of, dtype_of, named_args, shape_of
from pt2mx.fx.graph.tensors import replace_tensor
from pt2mx.ops.checks import HIGH_PRECISION

aten = torch.ops.aten


class Scaled(NamedTuple):
    """A node whose value is to be multiplied by a factor that broadcasts to it."""

    node: Node
    factor: Tensor


#: what has to be scaled such that a node's result is; several ways, of which one suffices
_Ways = list[list[Scaled]]


class Folder:
    """Folds factors into the parameters of a graph that does not write them."""

    def __init__(self, model: GraphModule, in_place: bool = False) -> None:
        self.model, self.in_place, self.written = model, in_place, written_nodes(model.graph)
        values = {node: id(_tensor(model, node)) for node in model.graph.find_nodes(op="get_attr")}
        reads: Counter[int] = Counter()
        for node, value in values.items():
            reads[value] += _reads(node)
        #: of a parameter's node, how often the parameter is read, by whatever name
        self.reads = {node: reads[value] for node, value in values.items()}

    def fold(self, node: Node, factor: Tensor) -> list[str]:
        """Multiply a node's value by a factor of its last dimension, (K,), by changing parameters; gives their names,
        none where that is not possible."""
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
        """The parameters that are to be scaled instead of a node; None where there is no way."""
        node, factor = scaled
        if node in self.written:
            return None
        if node.op == "get_attr":
            return self._parameter(node, factor)
        if not _fits(factor, shape_of(node) or ()):
            return None
        for way in _WAYS[node.target](node, factor) if node.target in _WAYS else []:
            if any(_reads(part.node) != 1 for part in way if part.node.op != "get_attr"):
                continue
            found = [self._edits(part) for part in way]
            if all(edits is not None for edits in found):
                return [edit for edits in found for edit in edits or []]
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
    """A parameter times a factor that broadcasts to it; None where that loses more than the square of its dtype's
    precision, relative to the largest value with the same factor: where values overflow or become subnormal."""
    scaled = value * factor.to(value.dtype)
    lost = (scaled.double() / factor.double() - value.double()).abs()
    same = [i - factor.dim() for i, n in enumerate(factor.shape) if n == 1]
    same = [*range(-value.dim(), -factor.dim()), *same]
    lost, largest = (x.amax(same) if same else x for x in (lost, value.double().abs()))
    return scaled if bool((lost <= torch.finfo(value.dtype).eps ** 2 * largest).all()) else None


def _tensor(model: GraphModule, node: Node) -> Tensor | None:
    try:
        return tensor_of(model, node)
    except TypeError:  # a graph inside this one
        return None


def _reads(node: Node) -> int:
    """The number of times that a graph reads a node, two in `x @ x`."""
    return sum(pytree.tree_leaves((user.args, user.kwargs)).count(node) for user in node.users)


def _fits(factor: Tensor, shape: tuple[int | str, ...]) -> bool:
    return factor.dim() == len(shape) and all(f in (1, n) for f, n in zip(factor.shape, shape, strict=True))


def _same(node: Node, factor: Tensor) -> _Ways:
    """The result is the first argument, or zero where that is negative."""
    return [[Scaled(node.all_input_nodes[0], factor)]]


def _cast(node: Node, factor: Tensor) -> _Ways:
    """To integers and to 8 bits values are rounded in steps that no factor moves."""
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
    """Of the factors one that has the factor's dimensions, a parameter before others."""
    operands = [x for x in args_of(node)[:2] if isinstance(x, Node)]
    if len(set(operands)) < 2:
        return []
    operands.sort(key=lambda x: x.op != "get_attr")
    return [[Scaled(x, factor)] for x in operands]


def _norm(node: Node, factor: Tensor) -> _Ways:
    given = named_args(node)
    dims = len(given["normalized_shape"])
    parameters = [given["weight"], *([given["bias"]] if given.get("bias") is not None else [])]
    if given["weight"] is None or factor.shape[:-dims].numel() != 1:
        return []
    return [[Scaled(parameter, factor.reshape(factor.shape[-dims:])) for parameter in parameters]]


def _rows(node: Node, factor: Tensor) -> _Ways:
    """Of x @ W.T + b, the rows of W and b."""
    given = named_args(node)
    return _of_product(given["weight"], (-1, 1), given["bias"], factor)


def _columns(node: Node, factor: Tensor) -> _Ways:
    """Of b + x @ W, the columns of W and b."""
    given = named_args(node)
    if (given["beta"], given["alpha"]) != (1, 1):
        return []
    return _of_product(given["mat2"], (1, -1), given["self"], factor)


def _of_product(weight: Node, shape: tuple[int, int], bias: Node | None, factor: Tensor) -> _Ways:
    if weight.op != "get_attr" or factor.numel() != factor.shape[-1]:
        return []
    vector = factor.reshape(-1)
    return [[Scaled(weight, vector.reshape(shape)), *([] if bias is None else [Scaled(bias, vector)])]]


def _attention(node: Node, factor: Tensor) -> _Ways:
    """The values: each result is a sum of them, along the dimension before the last."""
    value = args_of(node)[2]
    return _second(value, shape_of(node) or (), factor)


def _matmul(node: Node, factor: Tensor) -> _Ways:
    return _second(args_of(node)[1], shape_of(node) or (), factor)


def _second(value: Node, shape: tuple[int | str, ...], factor: Tensor) -> _Ways:
    """The second factor of a product, whose other dimensions are those of the result."""
    before = shape_of(value) or ()
    same = len(before) == len(shape) and before[:-2] == shape[:-2] and before[-1:] == shape[-1:]
    return [[Scaled(value, factor)]] if same and len(before) >= 2 and factor.shape[-2] == 1 else []


#: operator -> the ways to scale its result
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
