"""`Conversion`: the nodes and bytes that remain when a prepared model is converted."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.aliasing import storage_of, written_storages
from pt2mx.fx.graph.constants import CONSTANT_KEY
from pt2mx.fx.graph.higher_order_ops import HOPCall, captured_operands, hop_calls, placeholders
from pt2mx.fx.graph.modes import has_effect
from pt2mx.fx.graph.node import attribute_of, called_module, model_of, node_arg
from pt2mx.fx.passes.fold_weights import computed_bias
from pt2mx.fx.training.fuse_batch_norm import NormalizedLayer, ScaledWeight
from pt2mx.fx.training.train_eval import TrainEvalModule
from pt2mx.pt2e.flow.packed_weights import packed_bytes
from pt2mx.pt2e.flow.sizes import size_of
from pt2mx.pt2e.flow.weights import constants_of, is_constant
from pt2mx.pt2e.observe.observer import MXObserver, observed_value


class Conversion:
    """A walk over a prepared graph and its subgraphs, from the results back, that finds what conversion keeps.

    Args:
        prepared: the model.
    """

    def __init__(self, prepared: GraphModule) -> None:
        self._kept: dict[int, Tensor] = {}  # float tensors, by identity
        self._made: dict[str, int] = {}  # bytes of new buffers, by the key of their computation
        self._captured = captured_operands(prepared)
        self._keys: dict[tuple[Node, int], str] = {}
        self._names: dict[str, str] = {}
        self._visited: dict[GraphModule, set[Node]] = {}
        self._written = written_storages(prepared)
        self._visit(prepared)

    def computes(self, node: Node) -> bool:
        """Return True for a node that the converted model computes or reads, unlike the factors of a weight."""
        return any(node in computed for computed in self._visited.values())

    def bytes(self) -> int:
        """Return the bytes of the converted model's tensors: float ones, and codes and scales, equal ones once."""
        tensors = self._kept.values()
        shared = size_of(tensor for tensor in tensors if storage_of(tensor) in self._written)
        # conversion copies the others
        copies = sum(tensor.nbytes for tensor in tensors if storage_of(tensor) not in self._written)
        return shared.bytes + copies + sum(self._made.values())

    def _visit(self, model: GraphModule) -> set[Node]:
        """Return the nodes of a graph that the converted one keeps, parameters and placeholders included."""
        if model not in self._visited:
            constants = constants_of(model)
            graphs = {call.node: call for call in hop_calls(model)}
            computed = self._visited[model] = set()
            for node in reversed(model.graph.nodes):
                if node in computed or node.op == "output" or _has_effect(node, constants):
                    computed |= {node, *self._reads(model, node, constants, graphs.get(node))}
            for node in computed:
                attribute = attribute_of(model, node) if node.op == "get_attr" else None
                if isinstance(attribute, Tensor):
                    self._kept[id(attribute)] = attribute
        return self._visited[model]

    def _reads(self, model: GraphModule, node: Node, constants: set[Node], call: HOPCall | None) -> list[Node]:
        """Return the inputs of a node in the converted graph."""
        if call is not None:
            passed = [operand for operand, _ in call.operands()]
            used = set()
            for _, graph in call.graphs:
                kept = self._visit(graph)
                for operand, placeholder in zip(passed, placeholders(graph), strict=True):
                    if placeholder in kept:
                        used.add(operand)
            return [n for n in node.all_input_nodes if n in used or n not in passed]
        module = called_module(node)
        if isinstance(module, MXObserver) and is_constant(node_arg(node), constants):
            for number in range(self._calls_of(model)):
                made = packed_bytes(cast(Tensor, observed_value(node)).shape, module.spec)
                self._made[self._key(node, number)] = made
            return []
        if any(p.meta.get(CONSTANT_KEY) for p in placeholders(model)):
            return node.all_input_nodes
        bias = computed_bias(node)
        if bias is not None and bias in constants:
            self._made[self._key(bias, 0)] = bias.meta["val"].nbytes
            return [n for n in node.all_input_nodes if n is not bias]
        if isinstance(module, NormalizedLayer):
            mean = node_arg(node, 5).meta["val"]
            self._made[f"{node} of {id(model)}"] = mean.nbytes  # its bias
            return [n for n in node.args[:2] if isinstance(n, Node)]
        return node.all_input_nodes

    def _calls_of(self, model: GraphModule) -> int:
        """Count the calls of a graph with different operands."""
        return max([1, *(len(self._captured.get(placeholder, ())) for placeholder in placeholders(model))])

    def _key(self, node: Node, number: int) -> str:
        """Return a name that is equal for nodes that compute the same from the same tensors in call `number`."""
        if (node, number) not in self._keys:
            self._keys[node, number] = self._new_key(node, number)
        return self._keys[node, number]

    def _new_key(self, node: Node, number: int) -> str:
        operands = self._captured.get(node, ())
        operand = operands[min(number, len(operands) - 1)] if operands else None
        if isinstance(operand, Node):
            return self._key(operand, number)
        if node.op == "get_attr":
            identity: object = id(attribute_of(model_of(node.graph), node))
        elif not node.all_input_nodes:
            identity = (id(node.graph), node.name)
        else:
            identity = _computation(node), torch.fx.map_arg((node.args, node.kwargs), lambda n: self._key(n, number))
        return self._names.setdefault(repr(identity), f"%{len(self._names)}")


def _computation(node: Node) -> object:
    """Return what a node computes from its arguments; equal for layers that share a weight and its batch norm."""
    module = called_module(node)
    if isinstance(module, MXObserver):
        return module.spec, module.spec.axis
    if isinstance(module, ScaledWeight):
        return "scaled", module.rank, module.eps, module.transposed, module.groups
    return node.target


def _has_effect(node: Node, constants: set[Node]) -> bool:
    """Return True for a node with an effect, which runs although nothing uses its result.

    Conversion removes assertions about constants, and the batch counters of training.
    """
    module = called_module(node)
    if isinstance(module, TrainEvalModule):
        return module.writes_in_evaluation
    asserts = node.target is torch.ops.aten._assert_tensor_metadata.default and node_arg(node) in constants
    return node.op != "placeholder" and has_effect(node) and not asserts
