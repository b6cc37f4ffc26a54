"""Find the values of a graph that are rotated together, and the weights that change with them.

Values are rotated in blocks along the last dimension. The search begins at one node and follows sums, views, norms and
attention to every node whose values must be rotated too. It ends at weights: embeddings and linear layers that write
rotated values, and linear layers that read them. Any other operator stops it with an `MXError`.

The gain of a norm multiplies each channel by its own factor, so a rotation before it is none after it. The linear
layers that read the result of the norm take the gain, and nothing else may read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.constants import computed_from
from pt2mx.fx.graph.node import args_of, dtype_of, named_args, node_arg, shape_of
from pt2mx.fx.graph.source_node import module_name
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.pt2e.quantizer.operators import operator_name

aten = torch.ops.aten


class Change(NamedTuple):
    """A change of a weight for one of its readers.

    Args:
        weight: the `get_attr` node of the weight.
        reader: the node that reads it.
        layer: the operator that computes with it, behind views.
        axis: the dimension to rotate, counted from the end.
        size: the values of a block.
        gain: a constant, (K,), that multiplies the weight along this dimension before; None: nothing does.
        part: the first index of the dimension to rotate, and the number of indices; None: all of them.
    """

    weight: Node
    reader: Node
    layer: Node
    axis: int
    size: int
    gain: Node | None = None
    part: tuple[int, int] | None = None


class Relation(NamedTuple):
    """The arguments of a call that are rotated if its result is.

    Args:
        sources: the arguments.
        gain: a constant, (K,), by which the call also multiplies the channels; None: by nothing.
    """

    sources: tuple[Node, ...]
    gain: Node | None = None


class Layer(NamedTuple):
    """The positions of a linear layer's arguments, and the dimensions of its weight that it reads and writes."""

    x: int
    weight: int
    bias: int | None
    reads: int
    writes: int


class RotatedValues:
    """The values that are rotated together with those of a node.

    Attributes:
        gains: rotated node -> the constant, (K,), that multiplies its channels until a linear layer takes it.
        changes: the changes of weights.
    """

    def __init__(self, start: Node, size: int) -> None:
        self.size = size
        self.gains: dict[Node, Node | None] = {}
        self.changes: list[Change] = []
        self._pending: list[Node] = []
        self._add(start, None)
        while self._pending:
            node = self._pending.pop()
            self._follow_source(node)
            for user in readers_of(node):
                self._follow_user(node, user)
        self._check_gains()

    def gain_weights(self) -> dict[Node, Node]:
        """Return gain -> the `get_attr` node that it is computed from."""
        return {gain: computed_from(gain)[0] for gain in self.gains.values() if gain is not None}

    def _add(self, node: Node, gain: Node | None) -> None:
        """Note a node whose values are rotated, to be followed later."""
        if node in self.gains:
            if self.gains[node] is not gain:
                refuse(node, _ADDED)
            return
        width = _width(node)
        if not isinstance(width, int) or width % self.size:
            refuse(node, f"has rows of {width} values, which blocks of {self.size} do not divide")
        self.gains[node] = gain
        self._pending.append(node)

    def _follow_source(self, node: Node) -> None:
        """Rotate what a node is computed from."""
        gain, relation = self.gains[node], _relation(node)
        if relation is not None:
            if relation.gain is not None and relation.gain is not gain:
                refuse(node, "applies the gain of a norm to values that are then added to others")
            for source in relation.sources:
                self._add(source, None if relation.gain is not None else gain)
            return
        if gain is not None:
            refuse(node, _ADDED)
        layer, part = _written_part(node)
        if layer is not None:
            positions, args = _LAYERS[operator_name(layer.target)], list(named_args(layer).values())
            self._change(layer, args[positions.weight], positions.writes, part=part)
            if positions.bias is not None and args[positions.bias] is not None:
                self._change(layer, args[positions.bias], -1, part=part)
        elif node.target is aten.embedding.default:
            self._change(node, node_arg(node), -1)
        elif node.op == "get_attr":
            for reader in readers_of(node):
                self._change(reader, node, -1)
        elif not _is_cache(node):
            is_input = node.op == "placeholder"
            refuse(node, "is an input of the program" if is_input else "writes values that no weight rotates")

    def _follow_user(self, node: Node, user: Node) -> None:
        """Rotate what is computed from a node, or the weight that multiplies it."""
        gain, relation = self.gains[node], _relation(user)
        sources = () if relation is None else relation.sources
        if relation is not None and sources.count(node) == _count(user, node):
            if relation.gain is not None and gain is not None:
                refuse(user, "multiplies by a second gain")
            self._add(user, gain if relation.gain is None else relation.gain)
            return
        layer = _LAYERS.get(operator_name(user.target))
        if layer is not None and _count(user, node) == 1 and list(named_args(user).values())[layer.x] is node:
            self._change(user, list(named_args(user).values())[layer.weight], layer.reads, gain)
        elif gain is not None or not _sums_squares(user):
            refuse(user, _REASONS.get(user.target, "reads rotated values and is no linear layer"))

    def _change(
        self, layer: Node, operand: Node, axis: int, gain: Node | None = None, part: tuple[int, int] | None = None
    ) -> None:
        """Note the change of a weight, which a layer reads itself, in another dtype or transposed."""
        reader = layer
        if gain is not None and shape_of(gain) != (shape_of(operand) or ())[axis:][:1]:
            refuse(layer, "reads the result of a norm in another shape")
        while operand.op != "get_attr":
            is_alone = len(readers_of(operand)) == 1
            if not is_alone or operand.target not in (aten.transpose.int, *_SAME):
                refuse(layer, f"reads a weight that {operand.name} computes")
            if operand.target is aten.transpose.int:
                rank = len(shape_of(operand) or ())
                first, second = (dim % rank - rank for dim in args_of(operand)[1:])
                axis = {first: second, second: first}.get(axis, axis)
            reader, operand = operand, node_arg(operand)
        self.changes.append(Change(operand, reader, layer, axis, self.size, gain, part))

    def _check_gains(self) -> None:
        """Refuse gains that anything but norms reads."""
        inside = {node for gain in self.gain_weights() for node in computed_from(gain)}
        for node in inside:
            for reader in readers_of(node):
                if reader not in inside and self.gains.get(reader) is not node:
                    refuse(reader, f"reads the gain of a norm, {node.name}")


def refuse(node: Node, reason: str) -> NoReturn:
    """Raise the `MXError` of a node that no rotation of weights allows."""
    call = operator_name(node.target) or node.op
    raise MXError(
        f"{module_name(node) or 'the program'}: {call} ({node.name}) {reason}, so no rotation can be folded into the "
        "weights: leave Rotation(online=False) out"
    )


def _relation(node: Node) -> Relation | None:
    """Return what is rotated with the result of a node; None for a node that does not keep rotated values."""
    find = _RELATIONS.get(node.target)
    return None if find is None or dtype_of(node) not in HIGH_PRECISION else find(node)


def readers_of(node: Node) -> list[Node]:
    """Return the users of a node that read its values, not only its shape or dtype."""
    return [user for user in node.users if user.target not in _READ_NO_VALUES and not _reads_dtype(user, node)]


def _reads_dtype(user: Node, node: Node) -> bool:
    return user.target is aten.type_as.default and user.args[0] is not node


def _count(user: Node, node: Node) -> int:
    """Count how often a call reads the values of a node."""
    arguments = user.args[:1] if user.target is aten.type_as.default else user.args
    return pytree.tree_leaves((arguments, user.kwargs)).count(node)


def _width(node: object) -> int | str:
    """Return the extent of the last dimension; 1 for a scalar."""
    return (1, *(shape_of(node) or ()))[-1]


def _is_constant(node: Node) -> bool:
    """Return whether a node is computed from one parameter or buffer alone."""
    leaves = [one for one in computed_from(node) if not one.all_input_nodes]
    return len(leaves) == 1 and leaves[0].op == "get_attr"


def _is_cache(node: Node) -> bool:
    """Return whether a node is an input into which the graph writes rotated values."""
    return node.op == "placeholder" and any(
        user.target is aten.index_copy_.default and user.args[0] is node for user in node.users
    )


def _sums_squares(node: Node) -> bool:
    """Return whether a node squares values that are only summed along the last dimension, as an RMS norm does."""
    if node.target is not aten.pow.Tensor_Scalar or args_of(node)[1] != 2:
        return False
    last = len(shape_of(node) or ()) - 1
    return all(
        reader.target in (aten.mean.dim, aten.sum.dim_IntList) and named_args(reader)["dim"] in ([-1], [last])
        for reader in readers_of(node)
    )


def _written_part(node: Node) -> tuple[Node | None, tuple[int, int] | None]:
    """Return the linear layer whose result a node is, and which part of it; None for another node."""
    if operator_name(node.target) in _LAYERS:
        return node, None
    if node.target is not aten.slice.Tensor or operator_name(node_arg(node).target) not in _LAYERS:
        return None, None
    layer, arguments = node_arg(node), named_args(node)
    first, width, whole = arguments["start"] or 0, _width(node), _width(layer)
    along_last = arguments["dim"] % len(shape_of(node) or ()) == len(shape_of(node) or ()) - 1
    if not along_last or arguments["step"] != 1:
        return None, None
    if not isinstance(first, int) or not isinstance(width, int) or not isinstance(whole, int):
        return None, None
    return layer, (first % whole, width)


def _same(node: Node) -> Relation | None:
    return Relation((node_arg(node),))


def _dropout(node: Node) -> Relation | None:
    return None if named_args(node)["train"] else _same(node)


def _expand(node: Node) -> Relation | None:
    return _same(node) if _width(node) == _width(node_arg(node)) else None


def _index(node: Node) -> Relation | None:
    indices = args_of(node)[1]
    keeps_last = len(indices) < len(shape_of(node_arg(node)) or ()) or indices[-1] is None
    return _same(node) if keeps_last else None


def _along_others(node: Node) -> Relation | None:
    """Select, sum, join, move or write along dimensions other than the last."""
    arguments = named_args(node)
    sources = pytree.tree_leaves([arguments.get(name) for name in ("self", "tensors", "source")])
    nodes = tuple(source for source in sources if isinstance(source, Node))
    dims = pytree.tree_leaves([value for name, value in arguments.items() if name.startswith("dim")])
    rank = max(len(shape_of(one) or ()) for one in (node, *nodes))
    return None if not dims or any(dim % rank == rank - 1 for dim in dims) else Relation(nodes)


def _sum(node: Node) -> Relation | None:
    terms = args_of(node)[:2]
    return Relation(terms) if all(isinstance(x, Node) and _width(x) == _width(node) for x in terms) else None


def _product(node: Node) -> Relation | None:
    """Multiply or divide rows by one factor each, or multiply channels by a constant each."""
    rows = [x for x in args_of(node)[:2] if isinstance(x, Node) and _width(x) == _width(node)]
    if len(rows) == 1:
        return Relation((rows[0],)) if node.target is aten.mul.Tensor or rows[0] is node.args[0] else None
    gains = [x for x in rows if _is_constant(x) and (shape_of(x) or ())[:-1] == ()]
    if node.target is not aten.mul.Tensor or len(gains) != 1:
        return None
    rows.remove(gains[0])
    return Relation((rows[0],), gains[0])


def _rms_norm(node: Node) -> Relation | None:
    arguments = named_args(node)
    is_plain = arguments["weight"] is None or len(arguments["normalized_shape"]) > 1
    return None if is_plain else Relation((node_arg(node),), arguments["weight"])


def _attention(node: Node) -> Relation | None:
    return Relation((node_arg(node, 2),))


def _matmul(node: Node) -> Relation | None:
    second = node_arg(node, 1)
    return Relation((second,)) if len(shape_of(second) or ()) > 1 else None


#: operators that return their first argument, in any dtype and layout
_SAME = (
    aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default,
    aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.neg.default,
)  # fmt: skip
#: operators that keep the order of all values
_RESHAPE = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unflatten.int, aten.flatten.using_ints,
)  # fmt: skip
_ALONG_OTHERS = (
    aten.slice.Tensor, aten.select.int, aten.index_select.default, aten.transpose.int, aten.unsqueeze.default,
    aten.squeeze.dim, aten.sum.dim_IntList, aten.mean.dim, aten.cat.default, aten.index_copy_.default,
)  # fmt: skip

#: operator -> what is rotated with its result
_RELATIONS: dict[object, Callable[[Node], Relation | None]] = {
    **dict.fromkeys((*_SAME, *_RESHAPE), _same),
    **dict.fromkeys(_ALONG_OTHERS, _along_others),
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor), _sum),
    **dict.fromkeys((aten.mul.Tensor, aten.div.Tensor), _product),
    **dict.fromkeys((aten.matmul.default, aten.bmm.default), _matmul),
    aten.dropout.default: _dropout,
    aten.expand.default: _expand,
    aten.index.Tensor: _index,
    aten.rms_norm.default: _rms_norm,
    aten.scaled_dot_product_attention.default: _attention,
}

#: operator -> its arguments; experts have (E, K, N) weights
_LAYERS = {
    "aten.linear": Layer(0, 1, 2, -1, -2),
    "aten.addmm": Layer(1, 2, 0, -2, -1),
    "aten._grouped_mm": Layer(0, 1, None, -2, -1),
    "transformers.grouped_mm_fallback": Layer(0, 1, None, -2, -1),
}

#: operators that read shapes alone
_READ_NO_VALUES = (aten._assert_tensor_metadata.default, aten.sym_size.int, aten.empty_like.default)

_ADDED = "is added to values to which the gain of a norm is applied"
#: operator -> why rotated values are none to it
_REASONS: dict[object, str] = {
    aten.layer_norm.default: "subtracts the mean of each row, which a rotation changes",
    "output": "returns rotated values",
}


def attention_values(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the values of each attention: what softmax or an operator of attention sums."""
    for node in nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            yield node_arg(node, 2)
        elif node.target in (aten.matmul.default, aten.bmm.default) and _is_softmax(node_arg(node)):
            yield node_arg(node, 1)


def _is_softmax(node: Node) -> bool:
    while node.target in (*_SAME, aten.dropout.default, aten.slice.Tensor):
        node = node_arg(node)
    return node.target in (aten.softmax.int, aten._softmax.default)
