"""Count the bytes of a model's tensors, in the float model and in the converted one.

Each tensor counts by the memory that it occupies, and a packed weight by its codes and scales. A float weight stays in
the converted model if an operator still uses it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import storage_of
from pt2mx.fx.graph.constants import computed_from
from pt2mx.fx.graph.higher_order_ops import captured_operands, graph_modules
from pt2mx.fx.graph.node import Dequantize, attribute_of, model_of, name_of, node_arg, parameter_of
from pt2mx.pt2e.flow.packed_weights import packed_bytes
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.pt2e.quantizer.operators import is_matmul_like
from pt2mx.spec import MXSpec

#: meta key of a `dequantize_mx` node: the list of `Source`s of a constant tensor
SOURCES_KEY = "mx_sources"

#: placeholder of a subgraph -> the operands that callers pass for it (`captured_operands`)
CapturedOperands = Mapping[Node, Sequence[object]]


class Size(NamedTuple):
    """A number of values, and their bytes."""

    values: int
    bytes: int


class Source(NamedTuple):
    """A constant operand.

    Args:
        name: of the parameter or buffer, else of the node that computes the operand.
        tensors: name -> size of each parameter and buffer from which the operand is computed.
        matmuls: the matmuls and the like that compute it from them, once, when the model is converted.
    """

    name: str
    tensors: dict[str, Size]
    matmuls: tuple[str, ...] = ()


def size_of(tensors: Iterable[Tensor]) -> Size:
    """Count the values and bytes of tensors. Shared memory counts once, in the dtype of the first tensor."""
    spans: dict[int, list[tuple[int, int]]] = {}
    itemsizes: dict[int, int] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        storage, itemsize = storage_of(tensor), tensor.element_size()
        itemsizes.setdefault(storage, itemsize)
        first = last = int(tensor.storage_offset())
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            last += (int(size) - 1) * int(stride)
        spans.setdefault(storage, []).append((first * itemsize, (last + 1) * itemsize))
    values = total = 0
    for storage, ranges in spans.items():
        covered = _covered(ranges)
        values += covered // itemsizes[storage]
        total += covered
    return Size(values, total)


def sources_of(node: Node, captured: CapturedOperands) -> list[Source]:
    """Return the sources of a constant node: one, or in a subgraph one for each tensor that it is called with."""
    while node.target is torch.ops.aten.alias.default:
        node = node_arg(node)
    if node in captured:
        sources = []
        for operand in _operands(node, captured):
            sources += sources_of(operand, {})
        return sources
    tensors, computing = {}, computed_from(node)
    for part in computing:
        for read in _operands(part, captured):
            value = attribute_of(model_of(read.graph), read) if read.op == "get_attr" else None
            if isinstance(value, Tensor):
                tensors[name_of(read)] = Size(value.numel(), value.nbytes)
    matmuls = tuple(part.name for part in computing if is_matmul_like(part.target))
    return [Source(name_of(node) if node.op == "get_attr" else node.name, tensors, matmuls)]


def sources_of_codes(dequantize: Node, captured: CapturedOperands) -> list[Source]:
    """Return the sources of a packed weight.

    Conversion notes them. In a model that was exported since, it is a tensor of the weight's size, named after its
    codes.
    """
    if SOURCES_KEY in dequantize.meta:
        return dequantize.meta[SOURCES_KEY]
    value = dequantize.meta["val"]
    size = Size(value.numel(), value.numel() * value.element_size())
    return [Source(name, {name: size}) for name in buffers_of(node_arg(dequantize), captured)]


def buffers_of(node: Node, captured: CapturedOperands) -> list[str]:
    """Return the names of the buffers that a node reads or represents; none where it is computed."""
    return [name_of(read) for read in _operands(node, captured) if read.op == "get_attr"]


def _operands(node: Node, captured: CapturedOperands) -> list[Node]:
    """Return the operands behind a placeholder, or the node itself."""
    return list(dict.fromkeys(operand for operand in captured.get(node, [node]) if isinstance(operand, Node)))


def _covered(spans: list[tuple[int, int]]) -> int:
    """Count the bytes that lie in any of several ranges."""
    covered = last = 0
    for start, end in sorted(spans):
        covered += max(end - max(start, last), 0)
        last = max(last, end)
    return covered


#: meta key of an optimized, prepared or converted model: the `Size` of the float model
FLOAT_SIZE_KEY = "mx_float_size"


def tensors_of(model: GraphModule) -> dict[str, Tensor]:
    """Return the parameters, buffers and constants that a model reads, by name, without the sums of its observers."""
    named: dict[str, object] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for node in model.graph.find_nodes(op="get_attr"):  # export leaves constants as plain attributes
        named.setdefault(name_of(node), attribute_of(model, node))
    read = {id(value) for graph in graph_modules(model) for value in _read(graph)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor) and id(value) in read}


def _read(graph: GraphModule) -> Iterator[object]:
    """Yield the attributes that nodes of a graph read, also nodes whose results nothing uses."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node.users:
            yield attribute_of(graph, node)
        elif node.op == "call_module":
            module = graph.get_submodule(name_of(node))
            if not isinstance(module, MXObserver):
                yield from (*module.parameters(), *module.buffers())


def float_size(model: GraphModule) -> Size:
    """Return the size of the tensors that the float model reads; an unused layer is no part of it.

    `optimize` and preparation note it. Otherwise it is the size of the tensors of `model`; a packed weight counts as
    the parameter before quantization.
    """
    if FLOAT_SIZE_KEY in model.meta:
        return model.meta[FLOAT_SIZE_KEY]
    tensors, captured = tensors_of(model), captured_operands(model)
    buffers: set[str] = set()
    # parameter -> format -> its parts: one parameter may be packed in two formats, or cast for an operator
    packed: dict[str, dict[tuple[MXSpec, torch.dtype], dict[str, Size]]] = defaultdict(lambda: defaultdict(dict))
    for graph in graph_modules(model):
        for node, call in Dequantize.calls_in(graph.graph):
            codes = buffers_of(call.codes, captured)
            scales = [scale for scale in (call.scale, call.tensor_scale) if scale is not None]
            buffers.update(codes, *(buffers_of(scale, captured) for scale in scales))
            for source in sources_of_codes(node, captured) if codes else ():
                for name, size in source.tensors.items():
                    parameter = parameter_of(name) if name in codes else name
                    packed[parameter][call.spec, call.dtype][name] = size
    values, total = size_of(tensor for name, tensor in tensors.items() if name not in buffers)
    for parameter, formats in packed.items():
        if parameter not in tensors:
            largest = max(_sum(parts.values()) for parts in formats.values())
            values, total = values + largest.values, total + largest.bytes
    return Size(values, total)


def _sum(sizes: Iterable[Size]) -> Size:
    return Size(*map(sum, zip(*sizes, strict=True)))


class Counted(NamedTuple):
    """The values of a constant operand, and its bytes in the float model and in the converted one."""

    values: int
    before: int
    after: int


class ByteCounter:
    """Counts operands in execution order; each tensor counts once."""

    def __init__(self) -> None:
        self._seen: set[object] = set()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, value: Tensor, spec: MXSpec | None, sources: list[Source]) -> Counted:
        """Count an operand with these sources, each of the shape of `value`; packed in `spec`, or in float."""
        values = before = after = 0
        for source in sources:
            if source.name not in self._seen:
                values += value.numel()
            before += self._take(value, source, "before")
            if spec is None:
                after += self._take(value, source, "after")
            elif (source.name, spec) not in self._seen:
                after += packed_bytes(value.shape, spec)
            self._seen |= {source.name, (source.name, spec)}
        return Counted(values, before, after)

    def _take(self, value: Tensor, source: Source, when: str) -> int:
        """Count the bytes of the source tensors that are not counted yet.

        If there is one source tensor, the operand may be a part of it, and at most the operand's number of values
        counts.
        """
        taken = 0
        for name, size in source.tensors.items():
            values = min(value.numel(), size.values) if len(source.tensors) == 1 else size.values
            new = min(size.bytes * values // max(size.values, 1), size.bytes - self._bytes[name, when])
            self._bytes[name, when] += new
            taken += new
        return taken
