"""The tensors of the float model that a constant operand is computed from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from pt2mx.fx.graph.aliasing import storage_of
from pt2mx.fx.graph.attributes import attribute_of, model_of, name_of
from pt2mx.fx.graph.constants import computed_from
from pt2mx.fx.graph.node import node_arg

#: meta key of a `dequantize_mx` node: the list of `Source`s of a constant tensor
SOURCES_KEY = "mx_sources"

#: placeholder of a graph inside another -> the operands that it stands for (`captured_operands`)
Outside = Mapping[Node, Sequence[object]]


class Size(NamedTuple):
    """A number of values, and the bytes that they take."""

    values: int
    bytes: int


class Source(NamedTuple):
    """A constant operand.

    Args:
        name: of the parameter or buffer, else of the node that computes the operand.
        tensors: name -> size of each parameter and buffer that it is computed from.
    """

    name: str
    tensors: dict[str, Size]


def size_of(tensors: Iterable[Tensor]) -> Size:
    """Count the values and bytes of tensors. Memory that several of them show counts once, in the dtype of the
    first."""
    spans: dict[int, list[tuple[int, int]]] = {}
    itemsizes: dict[int, int] = {}
    for tensor in filter(Tensor.numel, tensors):
        itemsize = tensor.element_size()
        itemsizes.setdefault(storage_of(tensor), itemsize)
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        first = int(tensor.storage_offset())
        last = first + sum((int(size) - 1) * int(stride) for size, stride in steps)
        spans.setdefault(storage_of(tensor), []).append((first * itemsize, (last + 1) * itemsize))
    covered = {storage: _covered(found) for storage, found in spans.items()}
    return Size(sum(size // itemsizes[storage] for storage, size in covered.items()), sum(covered.values()))


def sources_of(node: Node, outside: Outside) -> list[Source]:
    """Return the sources of a constant node. A graph inside may be called with several tensors: it has one for each."""
    while node.target is torch.ops.aten.alias.default:
        node = node_arg(node)
    if node in outside:
        return [source for operand in _operands(node, outside) for source in sources_of(operand, {})]
    tensors = {}
    for read in [operand for one in computed_from(node) for operand in _operands(one, outside)]:
        if read.op == "get_attr" and isinstance(value := attribute_of(model_of(read.graph), read), Tensor):
            tensors[name_of(read)] = Size(value.numel(), value.nbytes)
    return [Source(name_of(node) if node.op == "get_attr" else node.name, tensors)]


def sources_of_codes(dequantize: Node, outside: Outside) -> list[Source]:
    """Return the sources of a packed weight: what conversion noted, else, where the model was exported since, a tensor
    of the weight's size by the name of its codes."""
    if SOURCES_KEY in dequantize.meta:
        return dequantize.meta[SOURCES_KEY]
    value = dequantize.meta["val"]
    size = Size(value.numel(), value.numel() * value.element_size())
    return [Source(name, {name: size}) for name in buffers_of(node_arg(dequantize), outside)]


def buffers_of(node: Node, outside: Outside) -> list[str]:
    """Return the names of the buffers that a node reads or represents; none where it is computed."""
    return [name_of(read) for read in _operands(node, outside) if read.op == "get_attr"]


def _operands(node: Node, outside: Outside) -> list[Node]:
    """Return the operands of a placeholder; another node itself."""
    return list(dict.fromkeys(operand for operand in outside.get(node, [node]) if isinstance(operand, Node)))


def _covered(spans: list[tuple[int, int]]) -> int:
    """Count the bytes in any of several ranges."""
    covered = reached = 0
    for start, end in sorted(spans):
        covered += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return covered
