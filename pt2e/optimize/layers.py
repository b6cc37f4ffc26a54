"""The repeated modules of a graph as submodules, which can compute their activations again for the gradient, and whose
parameters ranks of `torch.distributed` share by FSDP2."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node

from pt2mx.fx.graph.aliasing import written_nodes
from pt2mx.fx.graph.constants import constant_nodes
from pt2mx.fx.graph.node import FakeQuantize, attribute_of
from pt2mx.fx.graph.tensors import copy_sharing_tensors, remove_unused, replace_node
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.optimize.segments import ModuleBlock, module_blocks

#: what `checkpoint_wrapper` puts into the names of parameters
_WRAPPER = "_checkpoint_wrapped_module."


def layered(
    model: GraphModule, recompute: bool, compile: bool, group: dist.ProcessGroup | None
) -> tuple[GraphModule, dict[str, Tensor]]:
    """Return a graph that calls each repeated module as a submodule, and its tensors by their names in `model`.

    It computes the same, and shares the parameters and the buffers that it only reads, unless ranks share them.

    Args:
        model: an exported graph, of which nothing changes.
        recompute: the submodules keep their inputs alone for the gradient, and compute their activations again.
        compile: each submodule, by torch.compile: those with the same operators are compiled once. What is between
            them stays eager; a graph without repeated modules is compiled as a whole.
        group: the ranks that share the parameters; None for one process.
    """
    result, layers = _outline(model)
    if compile and layers:
        _compile(result, layers)
    elif compile:
        result.compile()
    if recompute:
        for name in layers:
            result.set_submodule(name, checkpoint_wrapper(result.get_submodule(name)))
    if group is not None:
        _shard(result, layers, group)
    return result, {_original_name(name, layers): tensor for name, tensor in tensors_by_name([result]).items()}


@torch.no_grad()
def fill(model: GraphModule, names: dict[str, Tensor]) -> None:
    """Give a model the values of trained tensors, whole ones."""
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, tensor in names.items():
        own[name].copy_(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def tensors_by_name(models: Sequence[GraphModule]) -> dict[str, Tensor]:
    """Return the parameters and buffers of the models by name, each once."""
    names: dict[Tensor, str] = {}
    for i, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            names.setdefault(tensor, f"slice_{i}.{name}" if i else name)
    return {name: tensor for tensor, name in names.items()}


def _outline(model: GraphModule) -> tuple[GraphModule, list[str]]:
    """Return a graph that calls each repeated module as a submodule, and the names of these submodules.

    The graph computes the same and shares the parameters of `model`, and the buffers that it only reads. A repeated
    module that writes, such as to the statistics of a batch norm, stays in the graph.
    """
    source = copy_sharing_tensors(model)
    _call_operators(source)
    _move_to_readers(source.graph)
    written = written_nodes(source.graph)
    outlined: dict[Node, ModuleBlock] = {}
    for block in module_blocks(source):
        if block.name and written.isdisjoint((*block.nodes, *block.inputs)):
            outlined.update(dict.fromkeys(block.nodes, block))
    graph = Graph()
    graph.set_codegen(source.graph._codegen)
    copies: dict[Node, Node] = {}
    attributes: dict[str, object] = {}
    layers: list[str] = []
    for node in source.graph.nodes:
        if node not in outlined:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op in ("get_attr", "call_module"):
                attributes[node.target] = attribute_of(source, node)
        elif node is (block := outlined[node]).nodes[-1]:
            layers.append(f"layer_{len(layers)}")
            attributes[layers[-1]], _ = block.copy(source)
            call = graph.call_module(layers[-1], tuple(copies[value] for value in block.inputs))
            for i, output in enumerate(block.outputs):
                copies[output] = graph.call_function(operator.getitem, (call, i))
    return remove_unused(GraphModule(attributes, graph)).train(model.training), layers


def _call_operators(model: GraphModule) -> None:
    """Call the operator of each module that rounds and does nothing else."""
    for node in model.graph.find_nodes(op="call_module"):
        module = attribute_of(model, node)
        if type(module) is MXFakeQuantize and module.only_rounds and len(node.args) == 1:
            call = FakeQuantize(node.args[0], module.spec, None, module.ste)
            with model.graph.inserting_before(node):
                rounded = model.graph.call_function(call.overload, call.args)
            replace_node(node, rounded)


def _move_to_readers(graph: Graph) -> None:
    """Move what quantizes a weight to the first operator that reads it, and so into the module of that operator."""
    constants = constant_nodes(graph)
    for node in graph.nodes:
        rounds = node.op == "call_module" or node.target is FakeQuantize.overload
        if rounds and node.users and constants.issuperset(node.all_input_nodes):
            min(node.users).prepend(node)


def _compile(model: GraphModule, layers: list[str]) -> None:
    """Compile the layers, in place; those that differ in their tensors alone call one function."""
    bodies: dict[str, GraphModule] = {}
    for name in layers:
        layer: Any = model.get_submodule(name)
        if layer.graph.find_nodes(op="call_module"):  # modules may have a state of their own
            layer.compile()
            continue
        body, tensors = _body(layer)
        body = bodies.setdefault(body.code, body)
        graph = Graph()
        inputs = [graph.node_copy(node) for node in layer.graph.find_nodes(op="placeholder")]
        values = [graph.node_copy(node) for node in tensors]
        graph.output(graph.call_module("body", (*values, *inputs)))
        layer.add_submodule("body", body)
        layer.graph = graph
    for body in bodies.values():
        body.compile()


def _body(layer: GraphModule) -> tuple[GraphModule, list[Node]]:
    """Return a layer without its tensors, which are the first arguments, and the nodes that read these in `layer`.

    The nodes have other names, so that two layers with the same operators have the same code.
    """
    tensors = layer.graph.find_nodes(op="get_attr")
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in (*tensors, *layer.graph.find_nodes(op="placeholder")):
        copies[node] = graph.placeholder(f"input_{len(copies)}")
    for node in layer.graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs, f"value_{len(copies)}")
        elif node.op == "output":
            graph.output(torch.fx.map_arg(node.args[0], copies.__getitem__))
    return GraphModule({}, graph), tensors


def _shard(model: GraphModule, layers: list[str], group: dist.ProcessGroup) -> None:
    """Share the parameters of a model among the ranks by FSDP2: those of a submodule are whole while it runs.

    A submodule whose parameters are tied to others does not shard by itself, but with the rest of the graph.
    """
    owners: dict[nn.Parameter, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.partition(".")[0]
        owners[parameter].add(owner if owner in layers else "")
    kind = next(iter(owners)).device.type
    mesh = DeviceMesh.from_group(group, kind)
    for name in layers:
        layer = model.get_submodule(name)
        if all(len(owners[parameter]) == 1 for parameter in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def _original_name(name: str, layers: list[str]) -> str:
    """Return the name of a parameter or buffer in the model that was outlined."""
    name = name.replace(_WRAPPER, "")
    first, _, rest = name.partition(".")
    return rest if first in layers else name
