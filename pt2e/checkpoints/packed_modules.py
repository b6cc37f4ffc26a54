"""Modules of transformers whose weights are codes and scales, dequantized when they are read."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx.fx.graph import node as nodes
from pt2mx.fx.graph.node import args_of, attribute_of, free_name, set_value, tensor_of
from pt2mx.fx.graph.tensors import replace_tensor
from pt2mx.ops.checks import from_front
from pt2mx.ops.hadamard import hadamard
from pt2mx.ops.quantization import Dequantize, Quantize
from pt2mx.pt2e.checkpoints.transform_config import matrix_of
from pt2mx.pt2e.models.weight_formats import PackedTensors
from pt2mx.spec import MXSpec

#: attribute of a module: parameter -> its spec, dtype and length
_FORMATS = "_mx_formats"
#: suffixes of a parameter's buffers
DATA, SCALE, TENSOR_SCALE = "_data", "_scale", "_tensor_scale"
#: buffers of a module: factors of its inputs, (K,), their rotation, and the tensor scale of its inputs
PRE_SCALE, _ROTATION, _INPUT_SCALE = "input_pre_scale", "input_rotation", "input_tensor_scale"


class Inputs(NamedTuple):
    """The steps that a module takes with its inputs before each call.

    Args:
        spec: the format to which they are quantized; None: high precision.
        tensor_scale: () float32, for a scale format with one.
        pre_scale: (K,) float, by which they are multiplied first; None: nothing.
        rotation: (group, group) float, which then multiplies each group of their values; None: nothing.
    """

    spec: MXSpec | None = None
    tensor_scale: Tensor | None = None
    pre_scale: Tensor | None = None
    rotation: Tensor | None = None


def replace_parameter(module: nn.Module, name: str, packed: PackedTensors, inputs: Inputs, transposed: bool) -> None:
    """Replace a parameter by the buffers `<name>_data`, `<name>_scale` and, for a scale format with one,
    `<name>_tensor_scale`, named as in a converted model.

    The module's own code reads the attribute `name`, which dequantizes them. Inputs are quantized before each call.

    Args:
        module: the module to change.
        name: the parameter, (..., N, K).
        packed: its codes and scales.
        inputs: what happens to the module's inputs.
        transposed: True where the parameter is (..., K, N).
    """
    parameter, axis = getattr(module, name), packed.data.dim() - 1 - transposed
    length = parameter.shape[axis]
    formats = module.__dict__.setdefault(_FORMATS, {})
    formats[name] = packed.spec.replace(axis=axis), parameter.dtype, length
    delattr(module, name)
    kind: Any = type(module)
    module.__class__ = _with_computed(kind, name)
    for suffix, tensor in ((DATA, packed.data), (SCALE, packed.scale)):
        module.register_buffer(f"{name}{suffix}", tensor.movedim(-1, axis).contiguous())
    if packed.tensor_scale is not None:
        module.register_buffer(f"{name}{TENSOR_SCALE}", packed.tensor_scale.clone())
    buffers = {PRE_SCALE: inputs.pre_scale, _ROTATION: inputs.rotation, _INPUT_SCALE: inputs.tensor_scale}
    for buffer, value in buffers.items():
        if value is not None:
            module.register_buffer(buffer, value)
    if inputs.pre_scale is not None:
        module.register_forward_pre_hook(_multiply_input)
    if inputs.rotation is not None:
        module.register_forward_pre_hook(_rotate_input)
    if inputs.spec is not None:
        module.register_forward_pre_hook(functools.partial(_quantize_input, inputs.spec))


@functools.cache
def _with_computed(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """Return a subclass whose attribute `name` is dequantized at each read."""

    def weight(self: nn.Module) -> Tensor:
        data, scale = getattr(self, name + DATA), getattr(self, name + SCALE)
        spec, dtype, length = getattr(self, _FORMATS)[name]
        return Dequantize(data, scale, spec, dtype, length, getattr(self, name + TENSOR_SCALE, None)).call()

    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, name: property(weight)}
    return type(kind.__name__, (kind,), namespace)


def multiply(module: nn.Module, location: str, matrix: Tensor) -> None:
    """Multiply the inputs of a module by a matrix before all that happens to them so far, or its outputs after it.

    Args:
        module: the module to change.
        location: "input" or "output".
        matrix: (size, size) float32, which multiplies each block of rows in float32.
    """
    size, name = len(matrix), free_name(module, f"{location}_matrix")
    is_ours = matrix.equal(matrix_of(size) * size**-0.5)
    if not is_ours:
        module.register_buffer(name, matrix)

    def product(module: nn.Module, x: Tensor) -> Tensor:
        return hadamard(x, size, -1) if is_ours else _in_blocks(x.float(), getattr(module, name)).to(x.dtype)

    if location == "input":
        module.register_forward_pre_hook(lambda module, args: (product(module, args[0]), *args[1:]), prepend=True)
    else:
        module.register_forward_hook(lambda module, args, output: product(module, output))


def _in_blocks(x: Tensor, matrix: Tensor) -> Tensor:
    return (x.unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)


def _multiply_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = args
    return x * getattr(module, PRE_SCALE), *others


def _rotate_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = args
    return _in_blocks(x, getattr(module, _ROTATION).to(x.dtype)), *others


def _quantize_input(spec: MXSpec, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = args
    spec, tensor_scale = from_front(spec, x), getattr(module, _INPUT_SCALE, None)
    scale, data = Quantize(x, spec, tensor_scale=tensor_scale).call()
    return Dequantize(data, scale, spec, x.dtype, x.shape[-1], tensor_scale).call(), *others


def placeholder(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a shape that takes the memory of one value."""
    return torch.zeros((), dtype=dtype).expand(shape)


def fold_transposes(model: GraphModule) -> bool:
    """Transpose the codes of packed weights that a graph transposes after decoding, as in a converted model.

    Codes that several nodes read, as in a module that is called twice, are transposed once, if all of them agree.
    Changes `model`.

    Returns:
        True where there were any.
    """
    readers: dict[int, set[Node]] = {}
    for attribute in model.graph.find_nodes(op="get_attr"):
        readers.setdefault(id(attribute_of(model, attribute)), set()).update(attribute.users)
    weights: dict[tuple[int, int], dict[Node, nodes.Dequantize]] = {}
    for node, call in nodes.Dequantize.calls_in(model.graph):
        if call.codes.op == call.scale.op == "get_attr":
            codes, scale = (id(tensor_of(model, attribute)) for attribute in (call.codes, call.scale))
            weights.setdefault((codes, scale), {})[node] = call
    folded = False
    for key, calls in weights.items():
        swaps = {_transposed(user) for node in calls for user in node.users}
        if len(swaps) == 1 and (swapped := swaps.pop()) and all(readers[one] == calls.keys() for one in key):
            _transpose(model, calls, swapped)
            folded = True
    model.recompile()
    return folded


def _transpose(model: GraphModule, calls: dict[Node, nodes.Dequantize], swapped: tuple[int, int]) -> None:
    """Transpose the codes and scales that calls share, in place of the transposes of their results."""
    first, second = swapped
    one = next(iter(calls.values()))
    for value in (tensor_of(model, one.codes), tensor_of(model, one.scale)):
        replace_tensor(model, value, value.transpose(first, second).contiguous())
    for attribute in {attribute for call in calls.values() for attribute in (call.codes, call.scale)}:
        attribute.meta["val"] = attribute.meta["val"].transpose(first, second).contiguous()
    for node, call in calls.items():
        axis = {first: second, second: first}.get(call.spec.axis, call.spec.axis)
        node.args = call.replace(spec=call.spec.replace(axis=axis)).args
        set_value(node)
        for user in list(node.users):
            user.replace_all_uses_with(node)
            model.graph.erase_node(user)


def _transposed(node: Node) -> tuple[int, int] | None:
    """Return the dimensions that a node swaps; None for other nodes."""
    if node.target is not torch.ops.aten.transpose.int:
        return None
    rank = node.meta["val"].dim()
    first, second = sorted(dim % rank for dim in args_of(node)[1:])
    return first, second
