"""The run of a model with batches, in which observers see the inputs of products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.attributes import model_of
from pt2mx.fx.graph.higher_order_ops import graph_modules, written_in
from pt2mx.fx.graph.node import dtype_of, shape_of
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.pt2e.optimize.distributed import add_up, least
from pt2mx.pt2e.optimize.losses import called_with
from pt2mx.pt2e.optimize.matmul_views import without_padding
from pt2mx.pt2e.optimize.observers import (
    FEWEST_COLUMNS,
    MXHessianObserver,
    MXIndexObserver,
    Size,
    bytes_of_sums,
    columns_within,
)
from pt2mx.pt2e.optimize.targets import Site

#: what no module of a user's model is called
_NAME = "_pt2mx_hessian_"
#: bytes of sums that every model may take
_LEAST_BUDGET = 1 << 30


def padding_mask_of(model: GraphModule, name: str) -> Node:
    """The input of that name, which says where there is padding.

    Raises:
        MXError: where there is none, and for one that is not (batch, sequence) of booleans or integers.
    """
    inputs = {node.name: node for node in model.graph.find_nodes(op="placeholder")}
    if name not in inputs:
        raise MXError(f"padding_mask={name!r} is no input of the model: {nearest(str(name), list(inputs))}")
    node = inputs[name]
    if not is_padding_mask(node):
        raise MXError(
            f"padding_mask={name!r} is {dtype_of(node)} of shape {shape_of(node)}: it must be (batch, sequence), "
            "booleans or integers, zero where there is padding"
        )
    return node


def is_padding_mask(node: Node) -> bool:
    """True of (batch, sequence) booleans or integers."""
    dtype = dtype_of(node)
    return dtype is not None and not dtype.is_floating_point and len(shape_of(node) or ()) == 2


def named_padding_mask(model: GraphModule) -> str | None:
    """The input that is a padding mask by its name and its type; None where there is none."""
    inputs = model.graph.find_nodes(op="placeholder")
    return next((node.name for node in inputs if node.name == "attention_mask" and is_padding_mask(node)), None)


class Seen(NamedTuple):
    """The findings of calibration, by the operators that read the weights: on the inputs of products, and on the rows
    that embeddings read."""

    inputs: dict[Node, MXHessianObserver]
    rows: dict[Node, MXIndexObserver]


def observe(
    model: GraphModule,
    sites: list[Site],
    batches: Iterable[object],
    mask: Node | None,
    group: dist.ProcessGroup | None,
) -> Seen:
    """Run the batches through a copy of the model that observes what the weights are multiplied with, and the indices
    of embeddings: what is read several times in one way by one observer."""
    observed = _Observed(model)
    written = written_in(model)
    shared: dict[tuple[object, ...], MXHessianObserver] = {}
    sizes: list[Size] = []
    seen = Seen({}, {})
    for site in sites:
        for reader in site.readers:
            if reader.indices is not None and reader.node not in seen.rows:
                seen.rows[reader.node] = MXIndexObserver(site.value.shape[0])
                observed.add(seen.rows[reader.node], _unpadded(reader.indices, mask), reader.node)
            if (product := reader.product) is None or not site.value.numel():
                continue
            if mask is not None and mask.graph is reader.node.graph:
                product = without_padding(product, mask)
            line, block = site.value.shape[product.layout.axis], reader.spec.block_size
            read = product.source, *product.beside
            # what is written between two readers is not the same for both
            apart = None if written.isdisjoint(read) else reader.node
            key = (read, product.layout.rows, line, block, apart)
            if key not in shared:
                shared[key] = MXHessianObserver(product.layout.rows, line, block)
                groups, _, k = product.layout.to_matrices(site.value.to("meta")).shape
                sizes.append(Size(groups, k, line, block))
                observed.add(shared[key], read, reader.node)
            seen.inputs[reader.node] = shared[key]
    _place(list(shared.values()), sizes, *_budgets(model))
    count = observed.run(batches)
    if not least(count, group):
        raise MXError("batches is empty: give batches of inputs, or preset='fast', which takes none")
    if sites:
        add_up(shared.values(), seen.rows.values(), sites[0].value.device, group)
    return seen


def _unpadded(indices: Node, mask: Node | None) -> tuple[Node, ...]:
    """The indices, and a mask that says where they are padding."""
    fits = mask is not None and mask.graph is indices.graph and str(shape_of(mask)) == str(shape_of(indices))
    return (indices, mask) if mask is not None and fits else (indices,)


class _Observed:
    """A copy of a model, in whose graphs modules see what nodes give."""

    def __init__(self, model: GraphModule) -> None:
        self.model = copy_sharing_tensors(model)
        graphs = zip(graph_modules(model), graph_modules(self.model), strict=True)
        pairs = [pair for own, copy in graphs for pair in zip(own.graph.nodes, copy.graph.nodes, strict=True)]
        self.copies = dict(pairs)
        self.names: list[tuple[GraphModule, str]] = []

    def add(self, module: nn.Module, nodes: Iterable[Node], before: Node) -> None:
        """Have a module see nodes, before another one runs."""
        graph, name = self.copies[before].graph, f"{_NAME}{len(self.names)}"
        model_of(graph).add_submodule(name, module)
        with graph.inserting_before(self.copies[before]):
            graph.call_module(name, tuple(self.copies[node] for node in nodes))
        self.names.append((model_of(graph), name))

    def run(self, batches: Iterable[object]) -> int:
        """Run the batches, give their number, and let go of the modules: what their owner replaces is gone."""
        for graph in graph_modules(self.model):
            graph.recompile()
        count = 0
        with torch.no_grad():
            for batch in batches:
                count += 1
                called_with(self.model, batch)
        for owner, name in self.names:
            owner.delete_submodule(name)
        return count


def _budgets(model: GraphModule) -> tuple[int, int]:
    """The bytes that the sums of all observers may take on the model's device, and on the host beside it. On an
    accelerator a quarter of the model's, or 1 GiB, with as much as the model on the host; on the host half of it."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    size = sum(tensor.nbytes for tensor in tensors)
    on_host = all(tensor.device.type == "cpu" for tensor in tensors)
    return (max(size // 2, _LEAST_BUDGET), 0) if on_host else (max(size // 4, _LEAST_BUDGET), size)


def _place(observers: list[MXHessianObserver], sizes: list[Size], on_device: int, on_host: int) -> None:
    """Give the observers columns with which their sums fit into both, and the host where the device is full."""
    columns = columns_within(on_device + on_host, sizes)
    while True:
        needed = [bytes_of_sums(size, columns) for size in sizes]
        there = _without_room(needed, on_device) if on_host else set()
        if sum(needed[i] for i in there) <= on_host or columns <= FEWEST_COLUMNS:
            break
        columns //= 2
    for i, observer in enumerate(observers):
        observer.columns, observer.home = columns, torch.device("cpu") if i in there else None


def _without_room(needed: list[int], room: int) -> set[int]:
    """The numbers of those that find no room any more, when they come one by one."""
    without = set()
    for i, size in enumerate(needed):
        if size > room:
            without.add(i)
        else:
            room -= size
    return without
