"""Modules of transformers whose weights are codes and scales: a weight is computed when it is read."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from pt2mx import ops
from pt2mx.pt2e.checkpoints.layouts import BLOCK
from pt2mx.pt2e.checkpoints.schemes import Scheme
from pt2mx.spec import MXSpec

#: attribute of a module: parameter -> the arguments of `dequantize_mx` behind codes and scales
_FORMATS = "_mx_formats"
#: the ends of the names of a parameter's buffers
DATA, SCALE = "_data", "_scale"


def hold_packed(module: nn.Module, name: str, scheme: Scheme, data: Tensor, scale: Tensor, transposed: bool) -> None:
    """Put codes and scales in the place of a parameter: buffers `<name>_data` and `<name>_scale`, as in a converted
    model, which the module's own code reads as the tensor that they stand for. Inputs are quantized before each call.

    Args:
        module: is changed.
        name: of the parameter, (..., N, K).
        scheme: the element, and the spec of inputs.
        data: (..., N, bytes of K) uint8.
        scale: (..., N, K / 32) uint8.
        transposed: True where the parameter is (..., K, N).
    """
    parameter, axis = getattr(module, name), data.dim() - 1 - transposed
    length = parameter.shape[axis]
    formats = module.__dict__.setdefault(_FORMATS, {})
    formats[name] = (scheme.element, BLOCK, parameter.dtype, axis, length)
    delattr(module, name)
    kind: Any = type(module)
    module.__class__ = _with_computed(kind, name)
    for suffix, tensor in ((DATA, data), (SCALE, scale)):
        module.register_buffer(f"{name}{suffix}", tensor.movedim(-1, axis).contiguous())
    if scheme.inputs is not None:
        module.register_forward_pre_hook(functools.partial(_quantize_input, scheme.inputs))


@functools.cache
def _with_computed(kind: type[nn.Module], name: str) -> type[nn.Module]:
    """The class, whose attribute `name` is computed."""

    def weight(self: nn.Module) -> Tensor:
        data, scale = getattr(self, name + DATA), getattr(self, name + SCALE)
        return ops.dequantize_mx(data, scale, *getattr(self, _FORMATS)[name])

    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, name: property(weight)}
    return type(kind.__name__, (kind,), own)


def _quantize_input(spec: MXSpec, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = args
    axis = x.dim() - 1
    scale, data = ops.quantize_mx(x, *spec.replace(axis=axis).op_args())
    length = x.shape[-1]
    return ops.dequantize_mx(data, scale, spec.element.name, spec.block_size, x.dtype, axis, length), *rest


def placeholder(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of that shape in the memory of one value."""
    return torch.zeros((), dtype=dtype).expand(shape)
