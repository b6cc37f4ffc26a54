"""The run of a model with batches, in which observers see the inputs of products."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.node import dtype_of, shape_of
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.pt2e.optimize.hessian_observer import FEWEST_COLUMNS, MXHessianObserver, Size, bytes_of_sums, columns_within
from pt2mx.pt2e.optimize.layouts import without_padding
from pt2mx.pt2e.optimize.ranks import add_up, least
from pt2mx.pt2e.optimize.sites import Site
from pt2mx.pt2e.optimize.training import called_with

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


def observe(
    model: GraphModule,
    sites: list[Site],
    batches: Iterable[object],
    mask: Node | None,
    group: dist.ProcessGroup | None,
) -> dict[Node, MXHessianObserver]:
    """Run the batches through a copy of the graph that observes what the weights are multiplied with: what is read
    several times in one way by one observer. Gives the observers by the nodes that read the weights."""
    observed = copy_sharing_tensors(model)
    nodes = {node.name: node for node in observed.graph.nodes}
    written = written_nodes(model.graph)
    shared: dict[tuple[object, ...], MXHessianObserver] = {}
    sizes: list[Size] = []
    found: dict[Node, MXHessianObserver] = {}
    for site in sites:
        for reader in site.readers:
            if (product := reader.product) is None or not site.value.numel():
                continue
            product = product if mask is None else without_padding(product, mask)
            line, block = site.value.shape[product.layout.axis], reader.spec.block_size
            read = product.source, *product.beside
            # what is written between two readers is not the same for both
            apart = None if written.isdisjoint(read) else reader.node
            key = (read, product.layout.rows, line, block, apart)
            if key not in shared:
                shared[key] = MXHessianObserver(product.layout.rows, line, block)
                groups, _, k = product.layout.to_matrices(site.value.to("meta")).shape
                sizes.append(Size(groups, k, line, block))
                name = f"{_NAME}{len(shared)}"
                observed.add_submodule(name, shared[key])
                with observed.graph.inserting_before(nodes[reader.node.name]):
                    observed.graph.call_module(name, tuple(nodes[node.name] for node in read))
            found[reader.node] = shared[key]
    _place(list(shared.values()), sizes, *_budgets(model))
    observed.recompile()
    count = 0
    with torch.no_grad():
        for batch in batches:
            count += 1
            called_with(observed, batch)
    if not least(count, group):
        raise MXError("batches is empty: give batches of inputs, or preset='fast', which takes none")
    for i in range(len(shared)):  # nothing but `found` holds the sums: what is replaced there is gone
        observed.delete_submodule(f"{_NAME}{i + 1}")
    if sites:
        add_up(shared.values(), sites[0].value.device, group)
    return found


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
