"""Run a model on batches, while observers record the inputs of its matmuls and the indices of its embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError, nearest
from pt2mx.fx.graph.higher_order_ops import graph_modules, written_in
from pt2mx.fx.graph.node import dtype_of, model_of, shape_of
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.optimize.distributed import all_reduce_sums, min_over_ranks
from pt2mx.pt2e.optimize.losses import call_with_batch
from pt2mx.pt2e.optimize.matmul_views import without_padding
from pt2mx.pt2e.optimize.observers import (
    FEWEST_COLUMNS,
    MOST_COLUMNS,
    MXHessianObserver,
    MXIndexObserver,
    Size,
    bytes_of_sums,
)
from pt2mx.pt2e.optimize.targets import WeightTarget

#: a prefix that no user's module name has
_NAME = "_pt2mx_hessian_"
#: bytes that the observers' sums may always take
_LEAST_BUDGET = 1 << 30


def padding_mask_of(model: GraphModule, name: str) -> Node:
    """Return the input node named `name`, which is zero where there is padding.

    Raises:
        MXError: if there is no such input, or it is not (batch, sequence) of booleans or integers.
    """
    inputs = {node.name: node for node in model.graph.find_nodes(op="placeholder")}
    if name not in inputs:
        raise MXError(f"padding_mask={name!r} is no input of the model: {nearest(str(name), list(inputs))}")
    node = inputs[name]
    if not _is_padding_mask(node):
        raise MXError(
            f"padding_mask={name!r} is {dtype_of(node)} of shape {shape_of(node)}: it must be (batch, sequence), "
            "booleans or integers, zero where there is padding"
        )
    return node


def _is_padding_mask(node: Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and not dtype.is_floating_point and len(shape_of(node) or ()) == 2


def named_padding_mask(model: GraphModule) -> str | None:
    """Return the name of the input that is a padding mask, by its name and type; None if there is none."""
    for node in model.graph.find_nodes(op="placeholder"):
        if node.name == "attention_mask" and _is_padding_mask(node):
            return node.name
    return None


class Calibration(NamedTuple):
    """The observers after calibration: matmul node -> observer of its input, embedding node -> observer of its
    indices."""

    inputs: dict[Node, MXHessianObserver]
    rows: dict[Node, MXIndexObserver]


def observe(
    model: GraphModule,
    targets: list[WeightTarget],
    batches: Iterable[object],
    mask: Node | None,
    group: dist.ProcessGroup | None,
) -> Calibration:
    """Run the batches through a copy of the model, with observers for matmul inputs and embedding indices.

    Consumers that read the same tensor in the same way share an observer.
    """
    observed = _Observed(model)
    written = written_in(model)
    shared: dict[tuple[object, ...], MXHessianObserver] = {}
    sizes: list[Size] = []
    calibration = Calibration({}, {})
    for target in targets:
        for consumer in target.consumers:
            node, matmul = consumer.node, consumer.matmul
            if consumer.indices is not None and node not in calibration.rows:
                calibration.rows[node] = MXIndexObserver(target.value.shape[0])
                observed.add(calibration.rows[node], _unpadded(consumer.indices, mask), node)
            if matmul is None or not target.value.numel():
                continue
            if mask is not None and mask.graph is node.graph:
                matmul = without_padding(matmul, mask)
            line, block = target.value.shape[matmul.view.axis], consumer.spec.block_size
            read = matmul.source, *matmul.extra_inputs
            # if the graph writes the tensor between two consumers, they read different values
            owner = None if written.isdisjoint(read) else node
            key = (read, matmul.view.rows, line, block, owner)
            if key not in shared:
                shared[key] = MXHessianObserver(matmul.view.rows, line, block)
                groups, _, k = matmul.view.to_matrices(target.value.to("meta")).shape
                sizes.append(Size(groups, k, line, block))
                observed.add(shared[key], read, node)
            calibration.inputs[node] = shared[key]
    _place(list(shared.values()), sizes, *_budgets(model))
    count = observed.run(batches)
    if not min_over_ranks(count, group):
        raise MXError(
            "the algorithms read calibration batches, and there are none: give some (`texts` for a language model), or "
            "choose the algorithms 'fast', which read none"
        )
    if targets:
        all_reduce_sums(shared.values(), calibration.rows.values(), targets[0].value.device, group)
    return calibration


def _unpadded(indices: Node, mask: Node | None) -> tuple[Node, ...]:
    if mask is None or mask.graph is not indices.graph or str(shape_of(mask)) != str(shape_of(indices)):
        return (indices,)
    return indices, mask


class _Observed:
    """A copy of a model with observer modules inserted in its graphs."""

    def __init__(self, model: GraphModule) -> None:
        self.model = copy_sharing_tensors(model)
        self.copies: dict[Node, Node] = {}
        for old, new in zip(graph_modules(model), graph_modules(self.model), strict=True):
            self.copies.update(zip(old.graph.nodes, new.graph.nodes, strict=True))
        self.names: list[tuple[GraphModule, str]] = []

    def add(self, module: nn.Module, nodes: Iterable[Node], before: Node) -> None:
        """Call `module` on the values of `nodes`, just before the node `before`."""
        place = self.copies[before]
        owner, name = model_of(place.graph), f"{_NAME}{len(self.names)}"
        owner.add_submodule(name, module)
        with place.graph.inserting_before(place):
            place.graph.call_module(name, tuple(map(self.copies.__getitem__, nodes)))
        self.names.append((owner, name))

    def run(self, batches: Iterable[object]) -> int:
        """Run the batches, return how many there were, and delete the observer modules from the copy."""
        # drop what no observer needs, such as the head of a language model, its largest matmul
        output = self.model.graph.output_node()
        output.args = torch.fx.map_arg(output.args, lambda node: None)
        self.model.graph.eliminate_dead_code(_may_observe)
        for graph in graph_modules(self.model):
            graph.recompile()
        count = 0
        with torch.no_grad():
            for batch in batches:
                count += 1
                with user_errors(f"run calibration batch {count}"):
                    call_with_batch(self.model, batch)
        for owner, name in self.names:
            owner.delete_submodule(name)
        return count


def _may_observe(node: Node) -> bool:
    """Return True for a node that does more than return a value, or calls subgraphs, which may have observers."""
    return node.is_impure() or isinstance(node.target, HigherOrderOperator)


def _budgets(model: GraphModule) -> tuple[int, int]:
    """Return the bytes that the sums of all observers may take on the model's device, and on the host.

    For a model on an accelerator: there a quarter of its size, at least 1 GiB, and on the host its size. For a model on
    the host: half of its size, at least 1 GiB.
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    size = sum(tensor.nbytes for tensor in tensors)
    on_host = all(tensor.device.type == "cpu" for tensor in tensors)
    return (max(size // 2, _LEAST_BUDGET), 0) if on_host else (max(size // 4, _LEAST_BUDGET), size)


def _place(observers: list[MXHessianObserver], sizes: list[Size], on_device: int, on_host: int) -> None:
    """Choose the observers' columns, a power of two from 32 to 4,096, so that their sums fit into memory.

    Sums for which the device has no room left go to the host. With 32 columns they need not fit.
    """
    columns = MOST_COLUMNS
    while True:
        room, moved = on_device, 0
        for observer, size in zip(observers, sizes, strict=True):
            needed = bytes_of_sums(size, columns)
            observer.columns = columns
            if needed <= room:
                observer.home = None
                room -= needed
            else:
                observer.home = torch.device("cpu")
                moved += needed
        if moved <= on_host or columns <= FEWEST_COLUMNS:
            break
        columns //= 2
