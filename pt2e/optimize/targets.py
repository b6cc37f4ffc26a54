"""Find the weights that a quantizer quantizes, and the operators that use them.

A subgraph reads a weight through a placeholder; its operators are found too.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.analysis.sums import rounding_noise
from pt2mx.fx.graph.constants import constant_nodes, evaluate, first_equal, mark_constants, root_name
from pt2mx.fx.graph.higher_order_ops import captured_operands, graph_modules, hop_calls
from pt2mx.fx.graph.node import named_args, register_buffer
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.graph.tensors import copy_sharing_tensors, replace_tensor
from pt2mx.modes import SCALE_MODES
from pt2mx.pt2e.flow.shared_scales import connected, sibling_key
from pt2mx.pt2e.observe import torchao_pt2e
from pt2mx.pt2e.observe.observer import ROUNDING_KEY
from pt2mx.pt2e.observe.tensor_scales import shared_amax
from pt2mx.pt2e.observe.torchao_pt2e import Q_ANNOTATION_KEY, Quantizer
from pt2mx.pt2e.optimize.matmul_views import Matmul, MatmulView, matmul_of
from pt2mx.pt2e.optimize.observers import MXHessianObserver, MXIndexObserver
from pt2mx.pt2e.quantizer.annotate import plan_operator
from pt2mx.pt2e.quantizer.operators import (
    CONFIG_KEY,
    OPERANDS,
    ROWS,
    arguments_of,
    gather_of,
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
        if OPERANDS.get(operator_name(self.node.target)) is not ROWS:
            return None
        indices = named_args(self.node)["indices"]
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
        placeholders: the placeholders of subgraphs to which some call passes the weight.
        calls: all nodes of the model that call a subgraph.
        consumers: the operators that quantize the weight.
        inputs: for each matmul its view of the weight, and the observer of its input.
        rows: the observers of embedding indices.
        smoothed: where the smoothing factors went; see `WeightReport`.
        in_place: True writes new values into the memory of the old ones.
        siblings: all weights that share its tensor scale, itself included; empty if it has its own.
        amax: () float32, the largest magnitude of the siblings before they are rounded; None if it has its own scale.
        goal: the float32 values to round in place of `value`; None: `value`.
    """

    name: str
    node: Node
    value: Tensor
    equal: list[Node]
    placeholders: list[Node]
    calls: set[Node]
    consumers: list[Consumer] = field(default_factory=list)
    inputs: list[tuple[MatmulView, MXHessianObserver]] = field(default_factory=list)
    rows: list[MXIndexObserver] = field(default_factory=list)
    smoothed: str = ""
    in_place: bool = False
    siblings: list[WeightTarget] = field(default_factory=list, repr=False)
    amax: Tensor | None = None
    goal: Tensor | None = field(default=None, repr=False)

    @property
    def wanted(self) -> Tensor:
        """Return the values to round, in the weight's dtype or in float32."""
        return self.value.detach() if self.goal is None else self.goal

    @property
    def modules(self) -> str:
        """Return the names of the modules that use the weight."""
        return ", ".join(dict.fromkeys(module_name(consumer.node) for consumer in self.consumers))


def weight_targets(model: GraphModule, quantizer: Quantizer, in_place: bool = False) -> list[WeightTarget]:
    """Find the weights that `quantizer` quantizes in `model`, each once however many operators use it.

    The result has nodes of `model`, which does not change, except that constant placeholders are marked. Weights that a
    subgraph computes are skipped: call `hoist_constants` first, which moves the computation to the outer graph.
    """
    mark_constants(model)
    equal = first_equal(model, constant_nodes(model.graph))
    operands = captured_operands(model)
    constants: set[Node] = set()
    calls: set[Node] = set()
    for graph in graph_modules(model):
        constants |= constant_nodes(graph.graph)
        calls.update(call.node for call in hop_calls(graph))
    targets: dict[Node, WeightTarget] = {}
    inputs = list(quantized_inputs(model, quantizer))
    specs = {(node, tensor): spec for node, tensor, _, spec in inputs}
    for node, tensor, role, spec in inputs:
        if role != "weight" or tensor not in constants:  # the model computes this weight at run time
            continue
        matmul = matmul_of(node, tensor)
        activation = None if matmul is None else specs.get((node, matmul.source))
        consumer = Consumer(node, tensor, spec, matmul, activation)
        passed = operands.get(tensor, [tensor])  # one for each call of the subgraph
        for first in dict.fromkeys(equal[x] for x in passed if isinstance(x, Node) and x in equal):
            if first not in targets:
                same = [n for n, other in equal.items() if other is first]
                places = [n for n, passed in operands.items() if not set(same).isdisjoint(passed)]
                value = evaluate(model, first)
                targets[first] = WeightTarget(root_name(first), first, value, same, places, calls, in_place=in_place)
            targets[first].consumers.append(consumer)
    _find_siblings(targets)
    return list(targets.values())


def _find_siblings(targets: dict[Node, WeightTarget]) -> None:
    """Set the siblings of each weight, as `share_tensor_scales` finds them in a prepared graph."""
    pairs = []
    for first, target in targets.items():
        for consumer in target.consumers:
            key = sibling_key(consumer.node, consumer.weight) if consumer.spec.has_tensor_scale else None
            if key is not None:
                pairs.append(((key, consumer.spec), first))
    for first, group in connected(pairs).items():
        if len(group) > 1 and first is group[0]:
            siblings = [targets[node] for node in group]
            amax = shared_amax(sibling.value for sibling in siblings)
            for sibling in siblings:
                sibling.siblings, sibling.amax = siblings, amax


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
        nodes = {node.name: node for node in original.graph.nodes}
        constants = constant_nodes(copy.graph)
        for node in quantizable_operators(copy.graph):
            if CONFIG_KEY not in node.meta:
                continue
            arguments = arguments_of(node)
            for operand, argument in arguments:
                gather = gather_of(argument, operand)
                if gather is not None:  # `plan_operator` skips annotated gathers
                    gather.meta.pop(Q_ANNOTATION_KEY, None)
            plan = plan_operator(node, node.meta[CONFIG_KEY], arguments, constants)
            for (tensor, _), (role, spec) in plan.inputs.items():
                original_tensor = nodes.get(tensor.name) or nodes[tensor.all_input_nodes[0].name]  # behind an alias
                yield nodes[node.name], original_tensor, role, spec


def reason_not_rounded(target: WeightTarget) -> str:
    """Return why a weight cannot be rounded; "" if it can."""
    spec = target.consumers[0].spec
    if spec.block_rows > 1:
        return "its blocks have several rows"
    if not spec.has_power_of_two_scale and _is_used_in_subgraph(target):
        return f"a subgraph quantizes it, and the scales of {spec} are stored in the outer graph"
    if any(consumer.spec != spec for consumer in target.consumers):
        return "its operators quantize it in different ways"
    for mode in (spec.scale_mode, spec.rounding):
        if mode in _UNSTABLE:
            return f"{mode} would quantize rounded values to others"
    if spec.has_power_of_two_scale and (spec.element.values or SCALE_MODES[spec.scale_mode].function):
        return f"{spec} would quantize rounded values to others"
    if not target.value.numel():
        return "it is empty"
    if not target.value.isfinite().all():
        return "it holds an Inf or a NaN"
    readers = _high_precision_readers(target)
    if any(consumer.argument_of in readers for consumer in target.consumers):
        return "an operator quantizes it and also reads it in high precision"
    if _is_used_in_subgraph(target) and any(reader.graph is not target.node.graph for reader in readers):
        return "a subgraph also reads it in high precision"
    return ""


def has_no_other_users(target: WeightTarget) -> bool:
    """Return True if only the quantized consumers use the parameter or buffer."""
    return target.node.op == "get_attr" and not _high_precision_readers(target)


def _high_precision_readers(target: WeightTarget) -> set[Node]:
    """Return the nodes that read a weight more often than they quantize it, under any name and in any subgraph."""
    reads: Counter[Node] = Counter()
    for node in (*target.equal, *target.placeholders):
        for user in node.users:
            reads[user] += pytree.tree_leaves((user.args, user.kwargs)).count(node)
    reads.subtract(consumer.argument_of for consumer in target.consumers)
    return {reader for reader, count in reads.items() if count > 0} - target.calls


def _is_used_in_subgraph(target: WeightTarget) -> bool:
    """Return True if a subgraph quantizes the weight."""
    return any(consumer.node.graph is not target.node.graph for consumer in target.consumers)


def note_rounding(target: WeightTarget, rounded: Tensor, exact: Tensor | None = None) -> None:
    """Note the noise of a rounded weight for the report, by its value or by `exact` float values."""
    noise = rounding_noise(target.value.detach() if exact is None else exact, rounded)
    for node in target.equal:
        node.meta[ROUNDING_KEY] = noise


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
            for call in target.calls & set(same.users):
                call.replace_input_with(same, node)
        return
    replace_tensor(model, target.value, value, target.in_place)
