"""Make an exported program of a changed graph, without an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2mx.fx.graph.constants import placeholders_first
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import set_value, value_of
from pt2mx.fx.graph.tensors import copy_sharing_tensors, deep_copy


def can_become_program(model: GraphModule, program: ExportedProgram) -> bool:
    """Return whether `program_of` takes a graph: without subgraphs, all of whose outputs are tensors."""
    outputs = program.graph_signature.output_specs
    tensors = all(isinstance(spec.arg, TensorArgument) and spec.kind is OutputKind.USER_OUTPUT for spec in outputs)
    return tensors and len(graph_modules(model)) == 1


def program_of(
    model: GraphModule, program: ExportedProgram, example: Mapping[str, Any] | None = None
) -> ExportedProgram:
    """Return the program of a graph, as an export of the graph would, without tracing it.

    Args:
        model: a graph that was made of `program.module()`, with its outputs, for which `can_become_program` is True.
            It does not change.
        program: the other program.
        example: example inputs by name, where the graph has other inputs than the program; None: it has the same.
    """
    model = copy_sharing_tensors(model, delays_code=True)  # the program generates its code
    graph, state, signature = model.graph, model.state_dict(keep_vars=True), program.graph_signature
    for node in graph.find_nodes(op="call_module", target="_guards_fn"):
        graph.erase_node(node)
    placeholders = graph.find_nodes(op="placeholder")
    tensors = _lift_tensors(model, state.keys())
    for node in list(graph.nodes):
        if node.op == "call_function" and "val" not in node.meta:
            set_value(node)
    results: Any = graph.output_node().args[0]
    outputs = [
        dataclasses.replace(spec, arg=TensorArgument(node.name))
        for spec, node in zip(signature.output_specs, results, strict=True)
    ]
    calls, example_inputs = deep_copy(program.module_call_graph), program.example_inputs
    if example is None:
        inputs = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        for spec, node in zip(inputs, placeholders, strict=True):
            node.name = spec.arg.name  # a copy of the graph has another name for what is also a builtin: `input`
    else:
        inputs = [InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None) for node in placeholders]
        example_inputs = (), dict(example)
        calls[0].signature.inputs = [spec.arg for spec in inputs]
        calls[0].signature.in_spec = pytree.tree_structure(example_inputs)
    return ExportedProgram(
        root=model,
        graph=graph,
        graph_signature=ExportGraphSignature([*tensors, *inputs], outputs),
        state_dict=state,
        range_constraints=dict(program.range_constraints),
        module_call_graph=calls,
        example_inputs=example_inputs,
        constants={name: attrgetter(name)(model) for spec in tensors if (name := str(spec.target)) not in state},
        verifiers=program.verifiers,
    )


def _lift_tensors(model: GraphModule, saved: Set[str]) -> list[InputSpec]:
    """Make the tensors that a graph reads its first inputs: parameters, buffers, constants. Return these inputs.

    `saved`: the names in the state of the graph.
    """
    placeholders_first(model)
    first, buffers = model.graph.find_nodes(op="placeholder")[0], dict(model.named_buffers())
    reads: dict[int, _Read] = {}  # a tied tensor has several names, and one input
    for node in model.graph.find_nodes(op="get_attr"):
        name, tensor = str(node.target), attrgetter(str(node.target))(model)
        if id(tensor) not in reads:
            reads[id(tensor)] = _Read(name, tensor, _kind_of(name, tensor, buffers), [])
        reads[id(tensor)].nodes.append(node)
    fake_mode = value_of(first).fake_mode
    specs = []
    for name, tensor, kind, nodes in sorted(reads.values(), key=lambda read: read.kind.value):
        with model.graph.inserting_before(first):
            lifted = model.graph.placeholder(f"{kind.name[0].lower()}_{name.replace('.', '_')}")
        lifted.meta["val"] = fake_mode.from_tensor(tensor, static_shapes=True)
        for node in nodes:
            node.replace_all_uses_with(lifted)
            model.graph.erase_node(node)
        persistent = name in saved if kind is InputKind.BUFFER else None
        specs.append(InputSpec(kind, TensorArgument(lifted.name), name, persistent))
    return specs


class _Read(NamedTuple):
    """A tensor of a graph, its first name, and the nodes that read it."""

    name: str
    tensor: Tensor
    kind: InputKind
    nodes: list[Node]


def _kind_of(name: str, tensor: Tensor, buffers: Mapping[str, Tensor]) -> InputKind:
    if isinstance(tensor, nn.Parameter):
        return InputKind.PARAMETER
    return InputKind.BUFFER if name in buffers else InputKind.CONSTANT_TENSOR
