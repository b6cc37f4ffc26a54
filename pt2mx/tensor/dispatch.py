"""Register the operators that take an `MXTensor`, and define what they do with its codes and scales.

Matmuls compute with the dequantized values. Copies apply the operator to each part. Every other operator moves whole
blocks: it is applied to the codes and to the scales, with sizes and positions along the block axis counted in bytes and
in scales. The operator applied to a meta tensor of the values gives the shape, the strides and torch's own errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from pt2mx.errors import MXError
from pt2mx.kernels.packing import packed_length, resized
from pt2mx.ops.checks import HIGH_PRECISION
from pt2mx.tensor.mx_tensor import MXTensor

aten = torch.ops.aten

#: views of blocks with several rows too
_VIEWS_OF_ROWS = (aten.detach.default, aten.alias.default, aten.permute.default, aten.transpose.int, aten.t.default)

#: codes, scales and block axis of a result
Parts = tuple[Tensor, Tensor, int]

_MATMULS = ("matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")


@MXTensor.implements([getattr(aten, name).default for name in (*_MATMULS, "linear")])
@MXTensor.implements_torch_function(
    [getattr(owner, name) for owner in (torch, Tensor) for name in _MATMULS]
    + [F.linear, Tensor.__matmul__, Tensor.__rmatmul__]
)
def _matmul(func: Callable, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Call the function on dequantized tensors, before torch decomposes it. The bits equal the bits of plain
    tensors."""
    args, kwargs = tree_map_only(MXTensor, MXTensor.to_dtype, (args, kwargs))
    return func(*args, **kwargs)


def _splits(op: OpOverload, x: MXTensor, what: str) -> MXError:
    return MXError(
        f"{op}: {what} would split a block of {x.description}; blocks stay whole, so dequantize it first, with "
        ".to_dtype()"
    )


def _check_rows(op: OpOverload, x: MXTensor) -> None:
    """Raise for blocks of several rows, of an operator that has no rule for them."""
    if x.block_rows > 1:
        raise MXError(
            f"{op}: {x.description} has blocks of several rows, which only transposes and copies move whole: "
            "dequantize it first, with .to_dtype()"
        )


def _mode_of_views(x: MXTensor) -> AbstractContextManager:
    """Return the mode in which to make views of x. A view of a normal tensor is no inference tensor, even if it is made
    in inference mode."""
    if torch.is_inference_mode_enabled() and not x.is_inference():
        return torch.inference_mode(False)
    return nullcontext()


def _view(*operators: OpOverload) -> Callable[[Callable[..., Parts]], Callable[..., Parts]]:
    """Register a rule `(operator, x, values of the result, *arguments) -> Parts` for operators that give a view."""

    def register(rule: Callable[..., Parts]) -> Callable[..., Parts]:
        @MXTensor.implements(list(operators))
        def handler(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> MXTensor:
            x, *rest = args
            with _mode_of_views(x):
                values = func(_values_of(x), *rest, **kwargs)
                if func not in _VIEWS_OF_ROWS:
                    _check_rows(func, x)
                result = x.with_parts(*rule(func, x, values, *rest, **kwargs), values)
            return return_and_correct_aliasing(func, args, kwargs, result)

        return rule

    return register


@_view(aten.detach.default, aten.alias.default)
def _same(op: OpOverload, x: MXTensor, values: Tensor) -> Parts:
    return op(x.qdata), op(x.scale), x.axis


@_view(aten.permute.default)
def _permute(op: OpOverload, x: MXTensor, values: Tensor, dims: list[int]) -> Parts:
    dims = [d % x.dim() for d in dims]
    axis, spec = dims.index(x.axis), x.spec
    if x.block_rows > 1 and dims[spec.replace(axis=axis).row_axis(x.dim())] != spec.row_axis(x.dim()):
        raise _splits(op, x, f"the order {dims} of its dimensions")
    return x.qdata.permute(dims), x.scale.permute(dims), axis


@_view(aten.transpose.int)
def _transpose(op: OpOverload, x: MXTensor, values: Tensor, dim0: int, dim1: int) -> Parts:
    dims = list(range(x.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(op, x, values, dims)


@_view(aten.t.default)
def _t(op: OpOverload, x: MXTensor, values: Tensor) -> Parts:
    return _permute(op, x, values, list(range(x.dim()))[::-1])


@_view(aten.unsqueeze.default)
def _unsqueeze(op: OpOverload, x: MXTensor, values: Tensor, dim: int) -> Parts:
    dim = dim % values.dim()
    return x.qdata.unsqueeze(dim), x.scale.unsqueeze(dim), x.axis + (dim <= x.axis)


@_view(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(op: OpOverload, x: MXTensor, values: Tensor, dims: int | list[int] | None = None) -> Parts:
    named = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    removed = tuple(d for d in (d % x.dim() for d in named) if x.shape[d] == 1)
    if x.axis in removed:
        raise _splits(op, x, "removing the block axis")
    return x.qdata.squeeze(removed), x.scale.squeeze(removed), x.axis - sum(d < x.axis for d in removed)


@_view(aten.expand.default)
def _expand(op: OpOverload, x: MXTensor, values: Tensor, size: list[int], implicit: bool = False) -> Parts:
    axis = x.axis + values.dim() - x.dim()
    if values.shape[axis] != x.shape[x.axis]:
        raise _splits(op, x, f"expanding dimension {x.axis} to {values.shape[axis]}")
    return *(part.expand(resized(values, axis, part.shape[x.axis])) for part in (x.qdata, x.scale)), axis


@_view(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _reshape(op: OpOverload, x: MXTensor, values: Tensor, *where: object) -> Parts:
    """Find the block axis among the new dimensions: the sizes after it multiply to the same number as before. It keeps
    its length, or it is split or merged with the dimensions before it at block boundaries."""
    length, inner = x.shape[x.axis], math.prod(x.shape[x.axis + 1 :])
    axes = [d for d in range(values.dim()) if math.prod(values.shape[d + 1 :]) == inner]
    kept = [d for d in axes if values.shape[d] == length]
    if not kept and x.holds_whole_blocks(length):
        kept = [d for d in axes if values.shape[d] and x.holds_whole_blocks(values.shape[d])]
    if not kept:
        raise _splits(op, x, f"a view as {tuple(values.shape)}")
    axis = x.axis if x.axis in kept else kept[-1]
    blocks = -(-values.shape[axis] // x.block_size)
    qdata = x.qdata.view(resized(values, axis, packed_length(values.shape[axis], x.elem_dtype.bits)))
    return qdata, x.scale.view(resized(values, axis, blocks)), axis


@_view(aten.select.int)
def _select(op: OpOverload, x: MXTensor, values: Tensor, dim: int, index: int) -> Parts:
    dim = dim % x.dim()
    if dim == x.axis:
        raise _splits(op, x, f"selecting {index} along dimension {dim}")
    return x.qdata.select(dim, index), x.scale.select(dim, index), x.axis - (dim < x.axis)


@_view(aten.slice.Tensor)
def _slice(
    op: OpOverload,
    x: MXTensor,
    values: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Parts:
    dim = dim % x.dim()
    if dim != x.axis:
        return op(x.qdata, dim, start, end, step), op(x.scale, dim, start, end, step), x.axis
    length = x.shape[dim]
    start, end, _ = slice(start, end).indices(length)
    if step != 1 or not x.holds_whole_blocks(start) or not (end == length or x.holds_whole_blocks(end)):
        raise _splits(op, x, f"the slice {start}:{end}:{step} along dimension {dim}")
    first, last = (packed_length(n, x.elem_dtype.bits) for n in (start, end))
    blocks = start // x.block_size, -(-end // x.block_size)
    return op(x.qdata, dim, first, last), op(x.scale, dim, *blocks), x.axis


@MXTensor.implements([aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int])
def _split(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MXTensor]:
    """Return one slice or selection per part, or raise the error of the first that splits a block."""
    x, *rest = args
    _check_rows(func, x)
    with _mode_of_views(x):
        values = func(_values_of(x), *rest, **kwargs)
        if func is aten.unbind.int:
            dim = _dimension(rest, 0)
            parts = [_select(func, x, v, dim, i) for i, v in enumerate(values)]
        else:
            dim = _dimension(rest, 1) % x.dim()
            edges = accumulate((v.shape[dim] for v in values), initial=0)
            parts = [
                _slice(aten.slice.Tensor, x, v, dim, *ends) for v, ends in zip(values, pairwise(edges), strict=True)
            ]
        result = [x.with_parts(*part, v) for part, v in zip(parts, values, strict=True)]
    return return_and_correct_aliasing(func, args, kwargs, result)


def _dimension(arguments: list, position: int) -> int:
    """Return the dimension, 0 if it is left out."""
    return arguments[position] if len(arguments) > position else 0


@MXTensor.implements(aten.cat.default)
def _cat(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> MXTensor:
    """Along the block axis all but the last must end with a whole block."""
    tensors, *rest = args
    mx = next(t for t in tensors if isinstance(t, MXTensor))
    if not all(isinstance(t, MXTensor) and (t.spec, t.dtype) == (mx.spec, mx.dtype) for t in tensors):
        raise MXError(
            f"{func}: all tensors must have the format and dtype of {mx.description} in {mx.dtype}: dequantize them "
            "first, with .to_dtype()"
        )
    _check_rows(func, mx)
    if not _have_one_tensor_scale(*tensors):
        raise MXError(
            f"{func}: all tensors must have the tensor scale of {mx.description}: dequantize them first, with "
            ".to_dtype(), or quantize them with one tensor_scale"
        )
    dim = _dimension(rest, 0) % mx.dim()
    if dim == mx.axis:
        for t in tensors[:-1]:
            if not t.holds_whole_blocks(t.shape[dim]):
                raise _splits(func, t, f"joining others to it along dimension {dim}")
    values = func([_values_of(t) for t in tensors], dim)
    return mx.with_parts(func([t.qdata for t in tensors], dim), func([t.scale for t in tensors], dim), mx.axis, values)


def _values_of(x: MXTensor) -> Tensor:
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
    result = _with_each_part(x, func(_values_of(x), **kwargs), func, **kwargs)
    return return_and_correct_aliasing(func, args, kwargs, result)


@MXTensor.implements(aten._to_copy.default)
def _to_copy(func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> MXTensor:
    """Copy to another device. Another dtype changes only the dtype of the dequantized values, not the codes."""
    x, dtype = args[0], kwargs.pop("dtype", None) or args[0].dtype
    if dtype not in HIGH_PRECISION:
        raise MXError(f"{func}: {x.description} cannot become {dtype}: dequantize it first, with .to_dtype()")
    values = func(_values_of(x), **{**kwargs, "dtype": dtype, "device": "meta", "pin_memory": None})
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
    if not _is_whole(target) and not _have_one_tensor_scale(target, source):
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


def _have_one_tensor_scale(*tensors: MXTensor) -> bool:
    """Return True if the tensors have equal tensor scales, or none has one."""
    first, *others = (x.tensor_scale for x in tensors)
    return all(t is first or (first is not None and t is not None and torch.equal(t, first)) for t in others)
