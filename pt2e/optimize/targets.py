"""The weights of an exported graph that a quantizer quantizes, and the operators that read them, those of the graphs
inside it too, where a placeholder stands for the weight."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.fx.graph.attributes import register_buffer
from pt2mx.fx.graph.constants import constant_nodes, evaluate, first_equal, mark_constants, root_name
from pt2mx.fx.graph.higher_order_ops import captured_operands, graph_modules, hop_calls
from pt2mx.fx.graph.node import named_args
from pt2mx.fx.graph.source_node import module_name
from pt2mx.fx.graph.tensors import copy_sharing_tensors, replace_tensor
from pt2mx.pt2e import torchao_pt2e
from pt2mx.pt2e.optimize.matmul_views import Layout, Product, product_of
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
from pt2mx.pt2e.torchao_pt2e import Q_ANNOTATION_KEY, Quantizer
from pt2mx.spec import MXSpec

#: scale modes and roundings under which rounded values would not quantize to themselves
_UNSTABLE = ("ceil", "stochastic")


@dataclass(frozen=True)
class Reader:
    """An operator that reads a weight, as `weight`, and quantizes it by `spec`. `product`: what it computes, where that
    is in the table of products; `activation`: the spec of the product's input, None where that is not quantized."""

    node: Node
    weight: Node
    spec: MXSpec
    product: Product | None
    activation: MXSpec | None = None

    @property
    def indices(self) -> Node | None:
        """The numbers of the weight's rows that an embedding reads; None of other operators."""
        indices = named_args(self.node)["indices"] if OPERANDS.get(operator_name(self.node.target)) is ROWS else None
        return indices if isinstance(indices, Node) else None

    @property
    def argument_of(self) -> Node:
        """The node that the weight is an argument of: the operator, or what gathers rows of the weight for it."""
        nodes = (self.node, *self.node.all_input_nodes)
        return next(node for node in nodes if self.weight in node.all_input_nodes)


@dataclass
class Site:
    """A weight: its name, the constant node of the outermost graph that is quantized, those of equal value, and its
    readers. `inputs`: what calibration has shown of their products, `rows`: of the rows that embeddings read;
    `smoothed`: where the factors of their inputs went; `in_place`: new values are written where the old ones lie."""

    name: str
    node: Node
    value: Tensor
    equal: list[Node]
    inside: Inside
    readers: list[Reader] = field(default_factory=list)
    inputs: list[tuple[Layout, MXHessianObserver]] = field(default_factory=list)
    rows: list[MXIndexObserver] = field(default_factory=list)
    smoothed: str = ""
    in_place: bool = False

    @property
    def modules(self) -> str:
        """The names of the modules that read the weight."""
        return ", ".join(dict.fromkeys(module_name(reader.node) for reader in self.readers))


@dataclass(frozen=True)
class Inside:
    """The graphs inside a model: what their placeholders stand for, and the nodes that call them."""

    standing: dict[Node, list[object]]
    calls: set[Node]


def weight_sites(model: GraphModule, quantizer: Quantizer, in_place: bool = False) -> list[Site]:
    """The weights that `quantizer` quantizes in `model`, each once however many operators read it. The nodes are those
    of `model`, which stays as it is, but for the marks of constant placeholders. A weight that a graph inside computes
    is none: `hoist_constants` has it computed outside."""
    mark_constants(model)
    graphs = graph_modules(model)
    inside = Inside(captured_operands(model), {call.node for graph in graphs for call in hop_calls(graph)})
    equal = first_equal(model, constant_nodes(model.graph))
    fixed = {node for graph in graphs for node in constant_nodes(graph.graph)}
    sites: dict[Node, Site] = {}
    inputs = list(quantized_inputs(model, quantizer))
    specs = {(node, tensor): spec for node, tensor, _, spec in inputs}
    for node, tensor, role, spec in inputs:
        if role != "weight" or tensor not in fixed:  # the model may compute a weight
            continue
        held = inside.standing.get(tensor, [tensor])  # one for each call of the graph
        for first in dict.fromkeys(equal[one] for one in held if isinstance(one, Node) and one in equal):
            if first not in sites:
                same = [n for n, other in equal.items() if other is first]
                sites[first] = Site(root_name(first), first, evaluate(model, first), same, inside, in_place=in_place)
            product = product_of(node, tensor)
            activation = None if product is None else specs.get((node, product.source))
            sites[first].readers.append(Reader(node, tensor, spec, product, activation))
    return list(sites.values())


def quantized_inputs(model: GraphModule, quantizer: Quantizer) -> Iterator[tuple[Node, Node, str, MXSpec]]:
    """Operator, quantized tensor, its role and spec, for all that `quantizer` quantizes in `model` and in the graphs
    inside it. A copy is annotated; the nodes are those of `model`."""
    annotated = copy_sharing_tensors(model)
    mark_constants(annotated)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prepare gives them
        annotated = torchao_pt2e.annotate(annotated, quantizer)
    for own, copy in zip(graph_modules(model), graph_modules(annotated), strict=True):
        yield from _quantized_in(copy.graph, {node.name: node for node in own.graph.nodes})


def _quantized_in(graph: Graph, nodes: dict[str, Node]) -> Iterator[tuple[Node, Node, str, MXSpec]]:
    constants = constant_nodes(graph)
    for node in quantizable_operators(graph):
        if CONFIG_KEY in node.meta:
            for gather in (gather_of(node, operand) for operand in operands_of(node)):
                if gather is not None:  # planned anew, it is not annotated yet
                    gather.meta.pop(Q_ANNOTATION_KEY, None)
            for (tensor, _), (role, spec) in plan_operator(node, node.meta[CONFIG_KEY], constants).inputs.items():
                name = tensor.name if tensor.name in nodes else tensor.all_input_nodes[0].name  # behind an alias
                yield nodes[node.name], nodes[name], role, spec


def why_not_rounded(site: Site) -> str:
    """The reason for which a weight is not rounded; "" where it is."""
    spec = site.readers[0].spec
    if any(reader.spec != spec for reader in site.readers):
        return "its readers quantize it in different ways"
    if unstable := [mode for mode in (spec.scale_mode, spec.rounding) if mode in _UNSTABLE]:
        return f"{unstable[0]} would quantize rounded values to others"
    if not site.value.numel():
        return "it is empty"
    if not site.value.isfinite().all():
        return "it holds an Inf or a NaN"
    reads, readers = _reads(site), Counter(reader.argument_of for reader in site.readers)
    if any(reads[reader] > count for reader, count in readers.items()):
        return "an operator quantizes it and reads it in high precision too"
    others = {user for node in _placeholders_of(site) for user in node.users} - readers.keys() - site.inside.calls
    if others and _is_read_inside(site):
        return "a graph inside reads it in high precision too"
    return ""


def is_read_by_these_alone(site: Site) -> bool:
    """True if nothing but its quantized readers reads the parameter or buffer."""
    readers = Counter(reader.argument_of for reader in site.readers)
    alone = all(n <= readers[user] for user, n in _reads(site).items() if user not in site.inside.calls)
    return site.node.op == "get_attr" and alone


def _placeholders_of(site: Site) -> list[Node]:
    """The placeholders of graphs inside that stand for a weight, in some call."""
    equal = set(site.equal)
    return [node for node, held in site.inside.standing.items() if any(one in equal for one in held)]


def _reads(site: Site) -> Counter[Node]:
    """The nodes that read a weight, by whatever name and in whatever graph, and how often each does."""
    reads: Counter[Node] = Counter()
    for node in (*site.equal, *_placeholders_of(site)):
        for user in node.users:
            reads[user] += pytree.tree_leaves((user.args, user.kwargs)).count(node)
    return reads


def _is_read_inside(site: Site) -> bool:
    """True if a graph inside quantizes the weight."""
    return any(reader.node.graph is not site.node.graph for reader in site.readers)


def set_weight(model: GraphModule, site: Site, value: Tensor) -> None:
    """Make the readers of a weight read `value`: under the weight's names where nothing else reads it, or from a buffer
    of its own."""
    if not is_read_by_these_alone(site):
        with model.graph.inserting_before(site.node):
            node = model.graph.get_attr(register_buffer(model, f"{site.name}_rounded", value))
        node.meta.update(site.node.meta)
        for reader in site.readers:
            if reader.node.graph is model.graph:
                reader.argument_of.replace_input_with(reader.weight, node)
        for same in site.equal if _is_read_inside(site) else ():
            for call in site.inside.calls & set(same.users):
                call.replace_input_with(same, node)
        return
    replace_tensor(model, site.value, value, site.in_place)
