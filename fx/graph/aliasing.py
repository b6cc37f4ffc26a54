"""Find the nodes that alias memory which the graph writes: `x[:, 0] = 5` exports as a write to a view of x.

A node aliases the memory that its value is, or is a view of.

A storage identifies memory, not a name: one buffer may be a view of another. An operator's schema says which arguments
its result shares memory with. A composite operator may return an argument without saying so (dropout in evaluation,
einsum of one tensor), so it is called on fake tensors. Nor do batch norms say that they write statistics in training
(`pt2mx.fx.graph.modes`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.fx.graph.modes import evaluates, mode_of
from pt2mx.fx.graph.node import OPERATOR_KEY, attribute_of, call_key, model_of, result_of, value_of

aten = torch.ops.aten

#: composite operators that return a new tensor; others may return their input, as `dropout` in evaluation does
_RETURN_NEW = (
    aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default, aten.layer_norm.default,
    aten.rms_norm.default, aten.softmax.int, aten.log_softmax.int,
)  # fmt: skip

#: cache: a call of a composite operator (`call_key`) -> positions of the inputs that it returns.
#: Many passes ask about the same calls, and each answer takes a call on fake tensors.
_RETURNED: WeakKeyDictionary[FakeTensorMode, dict[tuple[object, ...], list[int]]] = WeakKeyDictionary()

#: the identity of a piece of memory: the node that makes it, or the storage of a parameter or buffer
Root = Node | int


def written_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that alias memory which an operator of the graph, or of a subgraph, writes."""
    roots, written = _memory(graph)
    return {node for node in roots if roots[node] & written}


def written_storages(model: GraphModule) -> set[int]:
    """Return the storages (`storage_of`) of parameters and buffers that the graph of `model` writes."""
    return {root for root in _memory(model.graph)[1] if not isinstance(root, Node)}


class Writes:
    """The writes of a graph, in order; false if there are none."""

    def __init__(self, graph: Graph) -> None:
        written = _written_by_node(graph)
        self._roots = _roots(graph) if written else {}
        self._order = {node: i for i, node in enumerate(graph.nodes)} if written else {}
        self._written = {node: self._memory_of(arguments) for node, arguments in written.items()}

    def __bool__(self) -> bool:
        return bool(self._written)

    def between(self, first: Node, last: Node, read: Iterable[Node]) -> bool:
        """Return whether a node between `first` and `last` writes memory that the nodes `read` alias."""
        if not self:
            return False
        shown, begin, end = self._memory_of(read), self._order[first], self._order[last]
        return any(begin < self._order[node] < end and roots & shown for node, roots in self._written.items())

    def reach(self, nodes: Iterable[Node]) -> bool:
        """Return whether the graph ever writes memory that one of the nodes aliases."""
        shown = self._memory_of(nodes) if self else frozenset()
        return any(roots & shown for roots in self._written.values())

    def shows_another(self, node: Node) -> bool:
        """Return whether the value of a node may alias its arguments, in a graph that writes something."""
        return node not in self._roots[node]

    def _memory_of(self, nodes: Iterable[Node]) -> frozenset[Root]:
        return frozenset[Root]().union(*(self._roots[node] for node in nodes))


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, equal for all tensors that share it."""
    return tensor.untyped_storage()._cdata


def _memory(graph: Graph) -> tuple[dict[Node, frozenset[Root]], frozenset[Root]]:
    """Return the memory that each node may alias, and the memory that the graph writes.

    Both are empty for a graph that writes nothing. Most graphs write nothing, and skip the analysis.
    """
    written = _written_by_node(graph)
    roots = _roots(graph) if written else {}
    return roots, frozenset().union(*(roots[n] for arguments in written.values() for n in arguments))


def _written_by_node(graph: Graph) -> dict[Node, list[Node]]:
    """Map each node that writes arguments to these arguments."""
    written = {}
    for node in graph.nodes:
        target: Any = node.target if node.op == "call_function" else node.meta.get(OPERATOR_KEY)
        if _may_write(target) and (arguments := _written_arguments(node, target)):
            written[node] = arguments
    return written


@functools.lru_cache(1024)
def _may_write(target: object) -> bool:
    """Return whether an operator may write its arguments."""
    if not isinstance(target, OpOverload):
        return isinstance(target, HigherOrderOperator)
    mode = mode_of(target)
    return target._schema.is_mutable or (mode is not None and bool(mode.written))


def _roots(graph: Graph) -> dict[Node, frozenset[Root]]:
    attributes = {node: attribute_of(model_of(graph), node) for node in graph.find_nodes(op="get_attr")}
    roots: dict[Node, frozenset[Root]] = {}
    for node in graph.nodes:
        shown, attribute = _shown_arguments(node), attributes.get(node)
        memory = storage_of(attribute) if isinstance(attribute, Tensor) else node
        roots[node] = frozenset().union(*(roots[n] for n in shown)) if shown else frozenset({memory})
    return roots


def _shown_arguments(node: Node) -> list[Node]:
    """Return the arguments whose memory the value of a node may alias."""
    target = node.target
    if isinstance(target, OpOverload):
        if _returns_view(target):
            return _aliased_arguments(node, target)
        return _returned(node) if may_return_input(target) else []
    if isinstance(target, HigherOrderOperator):
        return _shown_inside(node)
    if target is operator.getitem or node.op == "call_module":  # a module such as an observer may return its argument
        return [n for n in node.args[:1] if isinstance(n, Node)]
    return node.all_input_nodes if node.op == "call_function" else []


def is_view(node: Node) -> bool:
    """Return whether a node's result may alias its first argument."""
    if isinstance(node.target, OpOverload):
        return _returns_view(node.target)
    return node.target is operator.getitem  # of several views


@functools.lru_cache(1024)
def _returns_view(target: OpOverload) -> bool:
    """Return whether a result of an operator shares memory with an argument, by the operator's schema."""
    return any(returned.alias_info is not None for returned in target._schema.returns)


@functools.lru_cache(1024)
def may_return_input(target: OpOverload) -> bool:
    """Return whether a composite operator may return its input."""
    is_composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return is_composite and bool(target._schema.returns) and target not in _RETURN_NEW


def _returned(node: Node) -> list[Node]:
    """Return the inputs that a composite operator returns; all inputs if a value is unknown."""
    inputs: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), inputs.append)
    operands = [value_of(n) for n in inputs]
    if any(operand is None for operand in operands):
        return inputs
    fake_modes = [operand.fake_mode for operand in operands if isinstance(operand, FakeTensor)]
    returned_of = _RETURNED.setdefault(fake_modes[0], {}) if fake_modes else {}
    call = call_key(node)
    if call not in returned_of:
        returned_of[call] = _returned_by_call(node, inputs)
    return [inputs[i] for i in returned_of[call]]


def _returned_by_call(node: Node, inputs: list[Node]) -> list[int]:
    try:
        operands = _in_own_memory(inputs)
        results = pytree.tree_leaves(result_of(node, operands))
    except RuntimeError:  # values that cannot be used again: those inside torch.vmap
        return list(range(len(inputs)))
    shown = {storage_of(result) for result in results if isinstance(result, Tensor)}
    tensors = [(i, operands[n]) for i, n in enumerate(inputs)]
    return [i for i, operand in tensors if isinstance(operand, Tensor) and storage_of(operand) in shown]


def _in_own_memory(nodes: list[Node]) -> dict[Node, Any]:
    """Return the values of nodes, no two in one memory, which the fake tensors of equal results may share."""
    values, seen = {n: value_of(n) for n in nodes}, set()
    for n, value in values.items():
        if isinstance(value, FakeTensor):
            if storage_of(value) in seen:
                values[n] = value.new_empty_strided(value.shape, value.stride())
            seen.add(storage_of(value))
    return values


def _written_arguments(node: Node, target: OpOverload | HigherOrderOperator) -> list[Node]:
    """Return the arguments that a call writes, of an operator that may write."""
    if isinstance(target, HigherOrderOperator):
        return _written_inside(node, target)
    passed, mode = _passed(node, target), mode_of(target)
    written = {name for name, is_written in _writes_by_argument(target).items() if is_written}
    if mode is not None:
        idle = node.op == "call_function" and evaluates(node)
        written = written - mode.written if idle else written | mode.written
    return [n for name, value in passed.items() if name in written for n in _nodes_in(value)]


def _written_inside(node: Node, target: HigherOrderOperator) -> list[Node]:
    """Return the operands of a higher-order operator that one of its subgraphs writes."""
    if "mutation" in target.name():  # the user's Triton kernel: it does not declare which operands it writes
        return [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, Node)]
    written = []
    for graph, operands in _subgraphs(node):
        _, roots = _memory(graph)
        written += [operand for placeholder, operand in operands if placeholder in roots]
    return written


def _shown_inside(node: Node) -> list[Node]:
    """Return the operands of a higher-order operator whose memory one of its subgraphs may return."""
    shown = []
    for graph, operands in _subgraphs(node):
        roots = _roots(graph)
        returned = frozenset().union(*(roots[n] for n in graph.output_node().all_input_nodes))
        shown += [operand for placeholder, operand in operands if roots[placeholder] & returned]
    return shown


def _subgraphs(node: Node) -> Iterator[tuple[Graph, list[tuple[Node, Node]]]]:
    """Yield the subgraphs of a higher-order operator, each with (placeholder, operand) pairs. The last arguments of the
    call are the operands, in the order of the placeholders."""
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    for argument in arguments:
        if isinstance(argument, Node) and argument.op == "get_attr":
            inner = attribute_of(model_of(node.graph), argument)
            if isinstance(inner, GraphModule):
                placeholders = inner.graph.find_nodes(op="placeholder")
                pairs = zip(reversed(placeholders), reversed(arguments), strict=False)
                yield inner.graph, [(inside, operand) for inside, operand in pairs if isinstance(operand, Node)]


def _aliased_arguments(node: Node, target: OpOverload) -> list[Node]:
    """Return the arguments that an operator writes or returns a view of."""
    writes = _writes_by_argument(target)
    return [n for name, value in _passed(node, target).items() if writes[name] is not None for n in _nodes_in(value)]


def _passed(node: Node, target: OpOverload) -> dict[str, Any]:
    """Return the arguments of a call by name, without those that it leaves out."""
    return dict(zip(_writes_by_argument(target), node.args, strict=False)) | node.kwargs


def _nodes_in(value: Any) -> list[Node]:
    return [n for n in pytree.tree_leaves(value) if isinstance(n, Node)]


@functools.lru_cache(1024)
def _writes_by_argument(target: OpOverload) -> dict[str, bool | None]:
    """Map the name of each argument, in the order of the schema, to whether the operator writes it. None: the operator
    neither writes it nor returns a view of it."""
    infos = {argument.name: argument.alias_info for argument in target._schema.arguments}
    return {name: None if info is None else info.is_write for name, info in infos.items()}
