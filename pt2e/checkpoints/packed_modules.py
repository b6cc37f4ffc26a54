"""Modules of transformers whose weights are codes and scales, dequantized when they are read."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2mx import ops
from pt2mx.fx.graph.node import Dequantize, args_of, set_value, tensor_of
from pt2mx.fx.graph.tensors import replace_tensor
from pt2mx.pt2e.checkpoints.weight_formats import PackedTensors
from pt2mx.spec import MXSpec

#: attribute of a module: parameter -> the arguments of `dequantize_mx` after codes and scales
_FORMATS = "_mx_formats"
#: suffixes of a parameter's buffers
DATA, SCALE = "_data", "_scale"


def replace_parameter(
    module: nn.Module, name: str, packed: PackedTensors, inputs: MXSpec | None, transposed: bool
) -> None:
    """Replace a parameter by the buffers `<name>_data` and `<name>_scale`, named as in a converted model.

    The module's own code reads the attribute `name`, which dequantizes them. Inputs are quantized before each call.

    Args:
        module: the module to change.
        name: the parameter, (..., N, K).
        packed: its codes and scales.
        inputs: the spec of the module's inputs; None: high precision.
        transposed: True where the parameter is (..., K, N).
    """
    parameter, axis = getattr(module, name), packed.data.dim() - 1 - transposed
    length = parameter.shape[axis]
    formats = module.__dict__.setdefault(_FORMATS, {})
    formats[name] = (packed.spec.element.name, packed.spec.block_size, parameter.dtype, axis, length)
    delattr(module, name)
    kind: Any = type(module)
    module.__class__ = _with_computed(kind, name)
    for suffix, tensor in ((DATA, packed.data), (SCALE, packed.scale)):
        module.register_buffer(f"{name}{suffix}", tensor.movedim(-1, axis).contiguous())
    if inputs is not None:
        module.register_forward_pre_hook(functools.partial(_quantize_input, inputs))


@functools.cache
def _with_computed(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """Return a subclass whose attribute `name` is dequantized at each read."""

    def weight(self: nn.Module) -> Tensor:
        data, scale = getattr(self, name + DATA), getattr(self, name + SCALE)
        return ops.dequantize_mx(data, scale, *getattr(self, _FORMATS)[name])

    namespace = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, name: property(weight)}
    return type(kind.__name__, (kind,), namespace)


def _quantize_input(spec: MXSpec, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = args
    axis = x.dim() - 1
    scale, data = ops.quantize_mx(x, *spec.replace(axis=axis).op_args())
    length = x.shape[-1]
    return ops.dequantize_mx(data, scale, spec.element.name, spec.block_size, x.dtype, axis, length), *others


def placeholder(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a shape that takes the memory of one value."""
    return torch.zeros((), dtype=dtype).expand(shape)


def fold_transposes(model: GraphModule) -> bool:
    """Transpose the codes of packed weights that a graph transposes after decoding, as in a converted model.

    Changes `model`.

    Returns:
        True where there were any.
    """
    folded = False
    for node, call in list(Dequantize.calls_in(model.graph)):
        swapped = _transposed(next(iter(node.users)))
        if call.codes.op != "get_attr" or swapped is None or any(_transposed(user) != swapped for user in node.users):
            continue
        for attribute in (call.codes, call.scale):
            value = tensor_of(model, attribute)
            replace_tensor(model, value, value.transpose(*swapped).contiguous())
            attribute.meta["val"] = attribute.meta["val"].transpose(*swapped).contiguous()
        (axis,) = set(swapped) - {call.axis} if call.axis in swapped else {call.axis}
        node.update_arg(5, axis)
        set_value(node)
        for user in list(node.users):
            user.replace_all_uses_with(node)
            model.graph.erase_node(user)
        folded = True
    model.recompile()
    return folded


def _transposed(node: Node) -> tuple[int, ...] | None:
    """Return the dimensions that a node swaps; None for other nodes."""
    if node.target is not torch.ops.aten.transpose.int:
        return None
    rank = node.meta["val"].dim()
    return tuple(sorted(dim % rank for dim in args_of(node)[1:]))
