"""`merge_lora`: add the updates of adapters to the weights, in float or in new codes."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2mx.analysis.sums import sqnr_db
from pt2mx.fx.graph.constants import evaluate
from pt2mx.fx.graph.node import LinearMX, insert_before, node_arg, value_of
from pt2mx.fx.graph.qdq import SPEC_KEY, insert_amax, insert_quantize_dequantize
from pt2mx.fx.graph.tensors import copy_sharing_tensors, map_tensors, remove_unused
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.fx.passes.undo_quantization import register_parameter, undo_quantization
from pt2mx.fx.training.packed_operands import use_converted_operators
from pt2mx.ops.quantization import Dequantize
from pt2mx.pt2e.lora.adapters import Adapter, adapters_of, linear_layers, qualified, read_parameter, unquantized
from pt2mx.pt2e.lora.peft_files import graph_with_adapters
from pt2mx.pt2e.optimize.slice import forget_recipe
from pt2mx.spec import MXSpec

aten = torch.ops.aten


class MergeError(NamedTuple):
    """The error of a merged weight as it is stored, in dB.

    Args:
        sqnr: of the sum of weight and update over the error.
        of_update: of the update over the error; below 0, rounding changed the weight more than training did.
    """

    sqnr: float
    of_update: float


class MergedLoRA(NamedTuple):
    """A model whose weights have the updates of its adapters.

    Args:
        model: the graph module.
        errors: module -> the error of its weight.
    """

    model: GraphModule
    errors: dict[str, MergeError]


def merge_lora(model: GraphModule | ExportedProgram, requantize: bool = False) -> MergedLoRA:
    """Add the updates of adapters to the weights of their layers.

    Args:
        model: what `add_lora` or `load_lora` returned, or an export of it. It does not change.
        requantize: False gives a float graph, whose other weights have the values of their codes: quantize it again by
            any recipe, with `optimize` for better rounding. True gives a converted graph: merged weights are rounded to
            new codes of their format. Of NVFP4, weights that shared a tensor scale share a new one.

    Returns:
        The model, and the error of each merged weight. New codes lose small updates, as `MergeError.of_update` shows:
        then deploy the adapters beside the codes. After an export, new codes have the default scale mode and rounding
        of their format. Weights of `x @ w` are stored transposed.

    Raises:
        MXError: for a model without adapters.

    Example:
        >>> import torch, pt2mx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 32)), torch.ones(2, 64)
        >>> exported = torch.export.export(model.eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only"))
        >>> lora = pt2mx.add_lora(pt2mx.convert_pt2e(prepared), rank=4)
        >>> _ = torch.nn.init.normal_(lora.get_parameter("0.lora_B.weight"))
        >>> merged = pt2mx.merge_lora(lora)
        >>> torch.allclose(merged.model(x), lora(x), atol=1e-5), merged.errors["0"].sqnr > 100
        (True, True)
        >>> requantized = pt2mx.merge_lora(lora, requantize=True)
        >>> requantized.errors["0"].sqnr > 15, dict(requantized.model.named_buffers()).keys()
        (True, dict_keys(['0.weight_scale', '0.weight_data']))
    """
    graph = copy_sharing_tensors(graph_with_adapters(model))
    map_tensors(graph, Tensor.detach)
    adapters, layers = adapters_of(graph), linear_layers(graph)
    scales = {_tensor_scale(graph, layers[module]) for module in adapters} - {None}
    shared = {module for module, nodes in layers.items() if _tensor_scale(graph, nodes) in scales}
    weights = {
        module: _merge(graph, module, nodes, adapters.get(module))
        for module, nodes in layers.items()
        if module in adapters or (requantize and module in shared)
    }
    remove_unused(graph)
    if requantize:
        _requantize(graph, list(weights.values()))
    use_converted_operators(graph)
    if not requantize:
        undo_quantization(graph)
        forget_recipe(graph)
    remove_unused(graph)
    return MergedLoRA(graph, {module: _error(graph, weights[module]) for module in adapters})


class _Merged(NamedTuple):
    """A merged weight: a parameter that layers read, of what it is the sum, and how it was quantized."""

    parameter: Node
    layers: list[Node]
    base: Dequantize[Tensor]
    update: Tensor
    spec: MXSpec
    tensor_scale: float | None


def _tensor_scale(graph: GraphModule, layers: list[Node]) -> float | None:
    """Return the tensor scale of a layer's weight, which is equal where weights share it; None without one."""
    scale = LinearMX.expect(layers[0]).tensor_scale
    return None if scale is None else evaluate(graph, scale).item()


def _first_call(graph: GraphModule) -> Node:
    return next(node for node in graph.graph.nodes if node.op == "call_function")


def _merge(graph: GraphModule, module: str, nodes: list[Node], adapter: Adapter | None) -> _Merged:
    """Make the calls of a layer read a parameter, the sum of its weight and the update of its adapter."""
    call = LinearMX.expect(nodes[0])
    shape = value_of(nodes[0]).shape[-1], value_of(call.x).shape[-1]
    codes, scale = evaluate(graph, call.codes), evaluate(graph, call.scale)
    tensor_scale = None if call.tensor_scale is None else evaluate(graph, call.tensor_scale)
    base = Dequantize(codes, scale, call.spec, torch.float32, shape[1], tensor_scale)
    update = torch.zeros(shape, device=codes.device) if adapter is None else adapter.update(unquantized(call.x)[1])
    value = (base.call() + update).to(value_of(nodes[0]).dtype)
    name = register_parameter(graph, qualified(module, "weight"), value)
    parameter = read_parameter(graph, name, _first_call(graph), nodes[0])
    layers = []
    for node in nodes:
        call = LinearMX.expect(node)
        plain = insert_before(node, aten.linear.default, call.x, parameter, call.bias)
        (node if adapter is None else adapter.sums[node]).replace_all_uses_with(plain)
        layers.append(plain)
    return _Merged(parameter, layers, base, update, node.meta.get(SPEC_KEY, call.spec), _tensor_scale(graph, nodes))


def _requantize(graph: GraphModule, weights: list[_Merged]) -> None:
    """Pack the parameters; those that shared a tensor scale share a new one."""
    groups: dict[object, list[_Merged]] = defaultdict(list)
    for weight in weights:
        groups[weight.tensor_scale or weight.parameter].append(weight)
    first = _first_call(graph)
    for group in groups.values():
        amax = insert_amax([weight.parameter for weight in group], first) if len(group) > 1 else None
        for weight in group:
            pair = insert_quantize_dequantize(weight.parameter, weight.spec, weight.layers[0], amax=amax)
            for layer in weight.layers:
                layer.replace_input_with(weight.parameter, pair)
    fold_all_weights(graph)


def _error(graph: GraphModule, weight: _Merged) -> MergeError:
    """Return the error of a weight, as the first of its layers reads it."""
    exact = weight.base.call() + weight.update
    noise = (evaluate(graph, node_arg(weight.layers[0], 1)).float() - exact).square().sum().item()
    return MergeError(*(sqnr_db(signal.square().sum().item(), noise) for signal in (exact, weight.update)))
