"""The packed weights of a converted model with the modules that use them, and their values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx.errors import MXError
from pt2mx.functional import dequantize_mx
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import Dequantize, args_of, is_ours, name_of, node_arg, parameter_of, shape_of, tensor_of
from pt2mx.fx.graph.qdq import quantize_of, spec_of_dequantize
from pt2mx.fx.graph.source_node import module_name
from pt2mx.ops.hadamard import hadamard
from pt2mx.pt2e.checkpoints.packed_modules import PRE_SCALE
from pt2mx.pt2e.checkpoints.select_weights import as_matrix, holds_columns
from pt2mx.pt2e.models.module_schemes import are_experts
from pt2mx.pt2e.models.weight_formats import PackedTensors, format_of
from pt2mx.pt2e.quantizer.operators import operand_node, operands_of, operator_name, quantizable_operators
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class WeightUser:
    """A module that uses a packed weight.

    Args:
        module: qualified name of the module in the graph.
        weight: qualified name of the parameter.
        spec: the format of the codes and scales.
        data: (..., N, bytes of K) uint8, for any axis in the graph.
        scale: (..., blocks of N, blocks of K).
        tensor_scale: () float32, for a scale format with one; (E,) for E experts with one each.
        inputs: the spec of the inputs that the module multiplies with it; None: high precision.
        input_scale: their tensor scale, () float32, for a scale format with one.
        pre_scale: (K,) float, by which the module multiplies inputs first; None: nothing.
        rotated: the number of values of inputs that `hadamard` rotates together first; 0: it rotates none.
    """

    module: str
    weight: str
    spec: MXSpec
    data: Tensor
    scale: Tensor
    tensor_scale: Tensor | None
    inputs: MXSpec | None
    input_scale: Tensor | None = None
    pre_scale: Tensor | None = None
    rotated: int = 0

    @property
    def form(self) -> str:
        """The name of the format."""
        return format_of(self.spec)

    @property
    def packed(self) -> PackedTensors:
        """The codes and scales."""
        return PackedTensors(self.data, self.scale, self.spec, self.tensor_scale)


def weight_users(model: GraphModule) -> list[WeightUser]:
    """Return each operator of a converted model that multiplies or gathers a packed weight.

    Raises:
        MXError: if anything except such weights and their inputs is quantized.
    """
    inner = [node for graph in graph_modules(model)[:-1] for node in graph.graph.nodes if is_ours(node)]
    users, explained = [], set()
    rotations: dict[Node, set[Node]] = {}
    for node in quantizable_operators(model.graph):
        weights: list[Node] = []
        inputs: list[Node] = []
        floats: list[Node] = []
        for operand in operands_of(node):
            argument = operand_node(node, operand)
            if argument is None or operand.name == "bias":
                continue
            call = Dequantize.of(argument)
            if call is None:
                floats.append(argument)
            elif call.codes.op == "get_attr":
                weights.append(argument)
            else:
                inputs.append(argument)
        if len(weights) == 1 and len(inputs) < 2:
            quantized = list(filter(None, map(quantize_of, inputs)))
            explained |= {*weights, *inputs, *quantized}
            user = _weight_user(model, node, weights[0], inputs)
            sources = [*floats, *map(node_arg, quantized)]
            if sources and (size := _rotated(sources[0])):
                rotations.setdefault(sources[0], set()).update((node, *quantized))
                user = dataclasses.replace(user, rotated=size)
            users.append(dataclasses.replace(user, pre_scale=_pre_scale(model, sources[0]) if sources else None))
    explained |= {rotation for rotation, readers in rotations.items() if readers >= set(rotation.users)}
    for node in (*inner, *(node for node in model.graph.nodes if is_ours(node) and node not in explained)):
        rotates = node.target is hadamard
        raise MXError(
            f"{module_name(node) or node.name} calls {operator_name(node.target)} for what is neither a weight nor the "
            "input multiplied with one: a checkpoint has no place for it; "
            + (
                "optimize without Rotation, as preset='fast' does, or with Rotation(online=False)"
                if rotates
                else "leave it in high precision"
            )
        )
    return users


def _weight_user(model: GraphModule, node: Node, weight: Node, inputs: list[Node]) -> WeightUser:
    to = Dequantize.expect(weight)
    data, scale = (tensor_of(model, node).movedim(to.spec.axis, -1) for node in (to.codes, to.scale))
    specs = list(map(spec_of_dequantize, inputs))
    for argument, spec in zip(inputs, specs, strict=True):
        if spec.axis % argument.meta["val"].dim() != argument.meta["val"].dim() - 1:
            raise MXError(f"inputs of {module_name(node)} have blocks along dimension {spec.axis}, not the last one")
    name = parameter_of(name_of(to.codes))
    spec, tensor_scale = spec_of_dequantize(weight).replace(axis=-1), _tensor_scale(model, weight)
    if not inputs:
        return WeightUser(module_name(node), name, spec, data, scale, tensor_scale, None)
    input_scale = _tensor_scale(model, inputs[0])
    return WeightUser(module_name(node), name, spec, data, scale, tensor_scale, specs[0], input_scale)


def _rotated(inputs: Node) -> int:
    """Return the number of values that a rotation of inputs along their last dimension rotates together; 0 for another
    node."""
    if inputs.target is not hadamard:
        return 0
    x, size, axis = args_of(inputs)
    return size if axis in (-1, len(shape_of(x) or ()) - 1) else 0


def _pre_scale(model: GraphModule, inputs: Node) -> Tensor | None:
    """Return the factors by which a module that `replace_parameter` changed multiplies its inputs."""
    if inputs.target is not torch.ops.aten.mul.Tensor:
        return None
    factors = args_of(inputs)[1]
    is_buffer = isinstance(factors, Node) and factors.op == "get_attr"
    return tensor_of(model, factors) if is_buffer and name_of(factors).endswith(PRE_SCALE) else None


def _tensor_scale(model: GraphModule, dequantize: Node) -> Tensor | None:
    """Return the tensor scale of a pair; None for a format without one.

    Raises:
        MXError: where each call computes it.
    """
    node = Dequantize.expect(dequantize).tensor_scale
    if node is not None and node.op != "get_attr":
        raise MXError(
            f"{module_name(dequantize)} computes the tensor scale of its inputs in each call, and checkpoints hold it: "
            "calibrate it"
        )
    return None if node is None else tensor_of(model, node)


def float_tensors(model: GraphModule, users: Sequence[WeightUser]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that are no codes, scales, or factors of inputs, under each of their names."""
    packed = {
        name_of(tensor)
        for node in model.graph.nodes
        if (to := Dequantize.of(node))
        for tensor in (to.codes, to.scale, to.tensor_scale)
        if tensor is not None and tensor.op == "get_attr"
    }
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    factors = {id(user.pre_scale) for user in users}
    return ((name, tensor.detach()) for name, tensor in named if name not in packed and id(tensor) not in factors)


def dequantized_values(
    packed: Mapping[str, WeightUser], patterns: Sequence[str], model: PreTrainedModel, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the dequantized values of the weights of some modules, in the shapes of the float model.

    Args:
        packed: parameter -> its packed form.
        patterns: regular expressions of modules.
        model: the float model.
        dtype: the dtype of the values.

    Raises:
        MXError: for a pattern that is invalid or matches no such module; for weights that values cannot replace.
    """
    values = {}
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise MXError(f"unpack={patterns!r} must be a list of regular expressions, such as ['.*embed_tokens']")
    for pattern in patterns:
        try:
            names = [name for name in packed if re.fullmatch(pattern, name.rpartition(".")[0])]
        except re.error as error:
            raise MXError(f"unpack: {pattern!r} is no regular expression: {error}") from None
        if not names:
            raise MXError(f"unpack: {pattern!r} is no module with a packed weight, such as {next(iter(packed))}")
        for name in names:
            user = packed[name]
            if user.inputs is not None:
                raise MXError(f"unpack: inputs of {name} are quantized, which a checkpoint states only with codes")
            if user.pre_scale is not None:
                raise MXError(f"unpack: inputs of {name} are multiplied by factors, which only codes have")
            if user.rotated:
                raise MXError(f"unpack: inputs of {name} are rotated, which a checkpoint states only with codes")
            values[name] = _values(name, user, model, dtype)
    return values


def _values(name: str, user: WeightUser, model: PreTrainedModel, dtype: torch.dtype) -> Tensor:
    layer, parameter = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    matrix = as_matrix(layer, parameter)
    *rows, columns = matrix.shape
    known = isinstance(layer, nn.Linear | nn.Embedding) or holds_columns(layer) or are_experts(layer)
    # for an unknown layer only the shape can tell the order of the dimensions
    if (*rows,) != user.data.shape[:-1] or (not known and (len(rows) > 1 or rows == [columns])):
        raise MXError(
            f"unpack: {name} of a {type(layer).__name__} cannot be told from its transpose: leave it in high precision "
            "(set_module_name_regex)"
        )
    values = dequantize_mx(
        user.data, user.scale, user.spec, target_dtype=dtype, length=columns, tensor_scale=user.tensor_scale
    )
    return as_matrix(layer, values)
