"""Find the weights that a quantizer quantizes, and the operators that use them.

A subgraph reads a weight through a placeholder; its operators are found too.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.fx.graph.constants import constant_nodes, evaluate, first_equal, mark_constants, root_name
from pt2mx.fx.graph.higher_order_ops import captured_operands, graph_modules, hop_calls
from pt2mx.fx.graph.node import named_args, register_buffer
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.graph.tensors import copy_sharing_tensors, replace_tensor
from pt2mx.pt2e.flow.shared_scales import connected, sibling_key
from pt2mx.pt2e.observe import torchao_pt2e
from pt2mx.pt2e.observe.tensor_scales import shared_amax
from pt2mx.pt2e.observe.torchao_pt2e import Q_ANNOTATION_KEY, Quantizer
from pt2mx.pt2e.optimize.matmul_views import Matmul, MatmulView, matmul_of
from pt2mx.pt2e.optimize.observers import MXHessianObserver, MXIndexObserver
from pt2mx.pt2e.quantizer.annotate import plan_operator
from pt2mx.pt2e.quantizer.operators import (
    CONFIG_KEY,
    OPERANDS,
    ROWS,
    gather_of,
    operands_of,
    operator_name,
    quantizable_operators,
)
from pt2mx.spec import MXSpec

#: scale modes and roundings that change values which already lie on the MX grid
_UNSTABLE = ("ceil", "stochastic")


@dataclass(frozen=True)
class Consumer:
    """An operator that quantizes a weight.

    Args:
        node: the operator.
        weight: the node from which the operator reads the weight; a placeholder in a subgraph.
        spec: the weight's spec.
        matmul: the matmul that the operator computes with the weight; None if it is no known matmul.
        activation: the spec of the matmul's input; None where the input stays in high precision.
    """

    node: Node
    weight: Node
    spec: MXSpec
    matmul: Matmul | None
    activation: MXSpec | None = None

    @property
    def indices(self) -> Node | None:
        """Return the row indices that an embedding reads; None for other operators."""
        indices = named_args(self.node)["indices"] if OPERANDS.get(operator_name(self.node.target)) is ROWS else None
        return indices if isinstance(indices, Node) else None

    @property
    def argument_of(self) -> Node:
        """Return the node that takes the weight as argument: the operator, or the gather of rows in front of it."""
        nodes = (self.node, *self.node.all_input_nodes)
        return next(node for node in nodes if self.weight in node.all_input_nodes)


@dataclass
class WeightTarget:
    """A weight to round, and its consumers.

    Args:
        name: of the parameter.
        node: the constant node of the outermost graph that is quantized.
        value: the tensor.
        equal: all constant nodes of that value.
        subgraphs: the subgraphs of the model.
        consumers: the operators that quantize the weight.
        inputs: for each matmul its view of the weight, and the observer of its input.
        rows: the observers of embedding indices.
        smoothed: where the smoothing factors went; see `WeightReport`.
        in_place: True writes new values into the memory of the old ones.
        siblings: all weights that share its tensor scale, itself included; empty if it has its own.
        amax: () float32, the largest magnitude of the siblings before they are rounded; None if it has its own scale.
    """

    name: str
    node: Node
    value: Tensor
    equal: list[Node]
    subgraphs: Subgraphs
    consumers: list[Consumer] = field(default_factory=list)
    inputs: list[tuple[MatmulView, MXHessianObserver]] = field(default_factory=list)
    rows: list[MXIndexObserver] = field(default_factory=list)
    smoothed: str = ""
    in_place: bool = False
    siblings: list[WeightTarget] = field(default_factory=list, repr=False)
    amax: Tensor | None = None

    @property
    def modules(self) -> str:
        """Return the names of the modules that use the weight."""
        return ", ".join(dict.fromkeys(module_name(consumer.node) for consumer in self.consumers))


@dataclass(frozen=True)
class Subgraphs:
    """The subgraphs of a model: the operands behind each placeholder, and the nodes that call a subgraph."""

    operands: dict[Node, list[object]]
    calls: set[Node]


def weight_targets(model: GraphModule, quantizer: Quantizer, in_place: bool = False) -> list[WeightTarget]:
    """Find the weights that `quantizer` quantizes in `model`, each once however many operators use it.

    The result has nodes of `model`, which does not change, except that constant placeholders are marked. Weights that a
    subgraph computes are skipped: call `hoist_constants` first, which moves the computation to the outer graph.
    """
    mark_constants(model)
    graphs = graph_modules(model)
    subgraphs = Subgraphs(captured_operands(model), {call.node for graph in graphs for call in hop_calls(graph)})
    equal = first_equal(model, constant_nodes(model.graph))
    constants = {node for graph in graphs for node in constant_nodes(graph.graph)}
    targets: dict[Node, WeightTarget] = {}
    inputs = list(quantized_inputs(model, quantizer))
    specs = {(node, tensor): spec for node, tensor, _, spec in inputs}
    for node, tensor, role, spec in inputs:
        if role != "weight" or tensor not in constants:  # the model computes this weight at run time
            continue
        operands = subgraphs.operands.get(tensor, [tensor])  # one for each call of the subgraph
        for first in dict.fromkeys(equal[x] for x in operands if isinstance(x, Node) and x in equal):
            if first not in targets:
                same = [n for n, other in equal.items() if other is first]
                targets[first] = WeightTarget(
                    root_name(first), first, evaluate(model, first), same, subgraphs, in_place=in_place
                )
            matmul = matmul_of(node, tensor)
            activation = None if matmul is None else specs.get((node, matmul.source))
            targets[first].consumers.append(Consumer(node, tensor, spec, matmul, activation))
    _find_siblings(targets)
    return list(targets.values())


def _find_siblings(targets: dict[Node, WeightTarget]) -> None:
    """Set the siblings of each weight, as `share_tensor_scales` finds them in a prepared graph."""
    consumers = [(first, consumer) for first, target in targets.items() for consumer in target.consumers]
    keys = [(sibling_key(c.node, c.weight), c.spec, first) for first, c in consumers if c.spec.has_tensor_scale]
    for first, group in connected(((key, spec), first) for key, spec, first in keys if key is not None).items():
        if len(group) > 1 and first is group[0]:
            siblings = [targets[one] for one in group]
            amax = shared_amax(one.value for one in siblings)
            for one in siblings:
                one.siblings, one.amax = siblings, amax


def quantized_inputs(model: GraphModule, quantizer: Quantizer) -> Iterator[tuple[Node, Node, str, MXSpec]]:
    """Yield operator, quantized tensor, role and spec for everything that `quantizer` quantizes, subgraphs included.

    This annotates a copy, but yields nodes of `model`.
    """
    annotated = copy_sharing_tensors(model)
    mark_constants(annotated)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prepare gives the same warnings
        annotated = torchao_pt2e.annotate(annotated, quantizer)
    for original, copy in zip(graph_modules(model), graph_modules(annotated), strict=True):
        yield from _quantized_in(copy.graph, {node.name: node for node in original.graph.nodes})


def _quantized_in(graph: Graph, nodes: dict[str, Node]) -> Iterator[tuple[Node, Node, str, MXSpec]]:
    constants = constant_nodes(graph)
    for node in quantizable_operators(graph):
        if CONFIG_KEY in node.meta:
            for gather in (gather_of(node, operand) for operand in operands_of(node)):
                if gather is not None:  # `plan_operator` skips annotated gathers
                    gather.meta.pop(Q_ANNOTATION_KEY, None)
            for (tensor, _), (role, spec) in plan_operator(node, node.meta[CONFIG_KEY], constants).inputs.items():
                name = tensor.name if tensor.name in nodes else tensor.all_input_nodes[0].name  # behind an alias
                yield nodes[node.name], nodes[name], role, spec


def reason_not_rounded(target: WeightTarget) -> str:
    """Return why a weight cannot be rounded; "" if it can."""
    spec = target.consumers[0].spec
    if spec.block_rows > 1:
        return "its blocks have several rows"
    if not spec.has_power_of_two_scale and _is_used_in_subgraph(target):
        return f"a subgraph quantizes it, and {spec.scale_format} scales are stored in the outer graph"
    if any(consumer.spec != spec for consumer in target.consumers):
        return "its operators quantize it in different ways"
    if unstable := [mode for mode in (spec.scale_mode, spec.rounding) if mode in _UNSTABLE]:
        return f"{unstable[0]} would quantize rounded values to others"
    if not target.value.numel():
        return "it is empty"
    if not target.value.isfinite().all():
        return "it holds an Inf or a NaN"
    reads, consumers = _reads(target), Counter(consumer.argument_of for consumer in target.consumers)
    if any(reads[consumer] > count for consumer, count in consumers.items()):
        return "an operator quantizes it and also reads it in high precision"
    others = {user for node in _placeholders_of(target) for user in node.users}
    others -= consumers.keys() | target.subgraphs.calls
    if others and _is_used_in_subgraph(target):
        return "a subgraph also reads it in high precision"
    return ""


def has_no_other_users(target: WeightTarget) -> bool:
    """Return True if only the quantized consumers use the parameter or buffer."""
    consumers = Counter(consumer.argument_of for consumer in target.consumers)
    alone = all(n <= consumers[user] for user, n in _reads(target).items() if user not in target.subgraphs.calls)
    return target.node.op == "get_attr" and alone


def _placeholders_of(target: WeightTarget) -> list[Node]:
    """Return the placeholders of subgraphs to which some call passes the weight."""
    equal = set(target.equal)
    return [node for node, operands in target.subgraphs.operands.items() if not equal.isdisjoint(operands)]


def _reads(target: WeightTarget) -> Counter[Node]:
    """Count how often each node reads a weight, under any name and in any subgraph."""
    reads: Counter[Node] = Counter()
    for node in (*target.equal, *_placeholders_of(target)):
        for user in node.users:
            reads[user] += pytree.tree_leaves((user.args, user.kwargs)).count(node)
    return reads


def _is_used_in_subgraph(target: WeightTarget) -> bool:
    """Return True if a subgraph quantizes the weight."""
    return any(consumer.node.graph is not target.node.graph for consumer in target.consumers)


def set_weight(model: GraphModule, target: WeightTarget, value: Tensor) -> None:
    """Make the consumers of a weight use `value`.

    The parameter itself is replaced where nothing else uses it; otherwise the consumers get a new buffer.
    """
    if not has_no_other_users(target):
        with model.graph.inserting_before(target.node):
            node = model.graph.get_attr(register_buffer(model, f"{target.name}_rounded", value))
        node.meta.update(target.node.meta)
        for consumer in target.consumers:
            if consumer.node.graph is model.graph:
                consumer.argument_of.replace_input_with(consumer.weight, node)
        for same in target.equal if _is_used_in_subgraph(target) else ():
            for call in target.subgraphs.calls & set(same.users):
                call.replace_input_with(same, node)
        return
    replace_tensor(model, target.value, value, target.in_place)
