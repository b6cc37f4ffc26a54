"""The adapters of a graph: insert them beside linear layers with packed weights, and find them again, also in a program
that was exported and loaded."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.constants import root_name
from pt2mx.fx.graph.node import (
    FakeQuantize,
    Hadamard,
    LinearMX,
    args_of,
    dtype_of,
    insert_before,
    name_of,
    node_arg,
    parameter_of,
    tensor_of,
    value_of,
)
from pt2mx.fx.graph.source_node import module_name
from pt2mx.ops.hadamard import hadamard

aten = torch.ops.aten
#: the names of the two factors of an update below their module, as peft has them
DOWN, UP = "lora_A.weight", "lora_B.weight"


class Adapter(NamedTuple):
    """The update of a linear layer's weight: `scaling * up @ down`.

    Args:
        down: (rank, K) float32.
        up: (N, rank) float32.
        scaling: alpha / rank.
        sums: layer -> the node that adds the update to its result, for each call of the layer.
    """

    down: Tensor
    up: Tensor
    scaling: float
    sums: dict[Node, Node]

    @property
    def rank(self) -> int:
        """The rank of the update."""
        return len(self.down)

    def update(self, rotation: int) -> Tensor:
        """Return the update, (N, K) float32, of a weight whose input is rotated first; 0: it is not."""
        down = hadamard(self.down.detach(), rotation, -1) if rotation else self.down.detach()
        return self.scaling * (self.up.detach() @ down)


def qualified(module: str, name: str) -> str:
    """Return the name of something in a module; the root's name is ""."""
    return f"{module}.{name}" if module else name


def linear_layers(model: GraphModule) -> dict[str, list[Node]]:
    """Return the linear layers that read packed weights: module -> its `linear_mx` nodes."""
    layers = defaultdict(list)
    for node, call in LinearMX.calls_in(model.graph):
        if call.codes.op == "get_attr":
            owner, _, weight = parameter_of(name_of(call.codes)).rpartition(".")
            caller = module_name(node)
            # a tied weight has the name of the embedding; a function of its caller reads a weight of another module
            module = owner if owner.startswith(caller) else caller
            if weight.partition("_")[0] == "weight":
                layers[module].append(node)
    return dict(layers)


def insert_adapter(model: GraphModule, module: str, layers: list[Node], rank: int, scaling: float) -> None:
    """Add an adapter, whose update is zero, to a linear layer. Changes `model`."""
    call = LinearMX.expect(layers[0])
    n, k = value_of(layers[0]).shape[-1], value_of(call.x).shape[-1]
    device = tensor_of(model, call.codes).device
    for name, (rows, columns) in {DOWN: (rank, k), UP: (n, rank)}.items():
        factor = nn.Linear(columns, rows, bias=False, device=device, dtype=torch.float32)  # initialized as peft does
        model.add_submodule(qualified(module, name).rpartition(".")[0], factor)
    nn.init.zeros_(model.get_parameter(qualified(module, UP)))
    for layer in layers:
        _insert_sum(model, module, layer, scaling)


def _insert_sum(model: GraphModule, module: str, layer: Node, scaling: float) -> None:
    users, place = list(layer.users), layer.next
    y, _ = unquantized(LinearMX.expect(layer).x)
    for name in (DOWN, UP):
        factor = read_parameter(model, qualified(module, name), place, layer)
        if dtype_of(y) != torch.float32:
            factor = insert_before(place, aten.to.dtype, factor, dtype_of(y))
        y = insert_before(place, aten.linear.default, y, factor)
    total = insert_before(place, aten.add.Tensor, layer, insert_before(place, aten.mul.Tensor, y, scaling))
    for user in users:
        user.replace_input_with(layer, total)


def read_parameter(model: GraphModule, name: str, place: Node, of: Node) -> Node:
    """Insert a node before `place` that reads a parameter, and return it; its value is of the fake mode of `of`."""
    with model.graph.inserting_before(place):
        node = model.graph.get_attr(name)
    node.meta["val"] = value_of(of).fake_mode.from_tensor(model.get_parameter(name), static_shapes=True)
    return node


def unquantized(x: Node) -> tuple[Node, int]:
    """Return what the flow rotated and quantized for the input of a linear layer, and the size of the rotation; 0: it
    rotated nothing."""
    if (quantized := FakeQuantize.of(x)) is not None:
        return unquantized(quantized.x)
    rotated = Hadamard.of(x)
    return (x, 0) if rotated is None else (rotated.x, rotated.size)


def adapters_of(model: GraphModule) -> dict[str, Adapter]:
    """Return the adapters of a graph by module."""
    adapters: dict[str, Adapter] = {}
    for module, layers in linear_layers(model).items():
        down, up = (qualified(module, name) for name in (DOWN, UP))
        sums, scaling = {}, 0.0
        for layer in layers:
            for user in layer.users:
                update = args_of(user)[1:2]
                if user.target is aten.add.Tensor and _is_update(update[0], layer, up):
                    sums[layer], scaling = user, args_of(update[0])[1]
        if sums:
            adapters[module] = Adapter(model.get_parameter(down), model.get_parameter(up), scaling, sums)
    return adapters


def _is_update(node: object, layer: Node, up: str) -> bool:
    """Return whether a node scales the product of a layer's input with both factors, of which `up` is the second."""
    if not isinstance(node, Node) or node.target is not aten.mul.Tensor:
        return False
    product = node_arg(node)
    if product.target is not aten.linear.default or root_name(node_arg(product, 1)) != up:
        return False
    return node_arg(node_arg(product)) is unquantized(LinearMX.expect(layer).x)[0]
