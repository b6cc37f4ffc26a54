"""Copies of an `MXTensor`: to other memory, another device, or into another `MXTensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import return_and_correct_aliasing

from pt2mx.errors import MXError
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.tensor.mx_tensor import MXTensor

aten = torch.ops.aten


def values_of(x: MXTensor) -> Tensor:
    """Return a tensor without memory that has the shape, strides and dtype of x's values."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _with_each_part(x: MXTensor, values: Tensor, func: OpOverload, *args: Any, **kwargs: Any) -> MXTensor:
    """Return x with the results of `func` for its plain tensors, and with the shape, strides and dtype of `values`."""
    of_scalars = {name: value for name, value in kwargs.items() if name != "memory_format"}
    parts = {name: func(part, *args, **(kwargs if part.dim() else of_scalars)) for name, part in x.parts.items()}
    return x.with_parts(**parts, axis=x.axis, values=values)


@MXTensor.implements(aten.clone.default)
def _clone(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> MXTensor:
    x = args[0]
    result = _with_each_part(x, func(values_of(x), **kwargs), func, **kwargs)
    return return_and_correct_aliasing(func, args, kwargs, result)


@MXTensor.implements(aten._to_copy.default)
def _to_copy(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> MXTensor:
    """Copy to another device. Another dtype changes only the dtype of the dequantized values, not the codes."""
    x, dtype = args[0], kwargs.pop("dtype", None) or args[0].dtype
    if dtype not in HIGH_PRECISION:
        raise MXError(f"{func}: {x.description} cannot become {dtype}: dequantize it first, with .to_dtype()")
    values = func(values_of(x), **{**kwargs, "dtype": dtype, "device": "meta", "pin_memory": None})
    return _with_each_part(x, values, func, **kwargs)


@MXTensor.implements(aten.is_pinned.default)
def _is_pinned(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x, *rest = args
    return all(func(part, *rest, **kwargs) for part in x.parts.values())


@MXTensor.implements(aten._pin_memory.default)
def _pin_memory(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> MXTensor:
    x, *rest = args
    return _with_each_part(x, x, func, *rest, **kwargs)


@MXTensor.implements(aten.record_stream.default)
def _record_stream(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, *rest = args
    for part in x.parts.values():
        func(part, *rest, **kwargs)


@MXTensor.implements(aten.copy_.default)
def _copy_(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> MXTensor:
    target, source = args[:2]
    same = isinstance(target, MXTensor) and isinstance(source, MXTensor) and target.shape == source.shape
    if not same or target.spec != source.spec:
        described = [t.description if isinstance(t, MXTensor) else f"a plain tensor of {t.dtype}" for t in args[:2]]
        raise MXError(
            f"{func}: cannot copy {described[1]} into {described[0]}: formats and shapes must agree; dequantize the "
            "source with .to_dtype(), or quantize it with MXTensor.to_mx; load_state_dict takes assign=True"
        )
    if not _is_whole(target) and not have_one_tensor_scale(target, source):
        raise MXError(
            f"{func}: cannot copy into a view of {target.description} codes of another tensor scale, which the rest of "
            "the tensor shares: quantize the source with MXTensor.to_mx(..., tensor_scale=target.tensor_scale)"
        )
    for part, new in zip(target.parts.values(), source.parts.values(), strict=True):
        part.copy_(new, *args[2:], **kwargs)
    return target


def _is_whole(x: MXTensor) -> bool:
    """Return whether the codes fill their memory, so that no other tensor has codes of the same tensor scale."""
    return x.tensor_scale is None or x.qdata.untyped_storage().nbytes() == x.qdata.numel()


def have_one_tensor_scale(*tensors: MXTensor) -> bool:
    """Return True if the tensors have equal tensor scales, or none has one."""
    first, *others = (x.tensor_scale for x in tensors)
    return all(t is first or (first is not None and t is not None and torch.equal(t, first)) for t in others)
