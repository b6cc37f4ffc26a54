"""Inductor's lowerings of operators to calls of `pt2mx.kernels.cpu.prepared`, which write to buffers of Inductor.

A lowering takes the operator's arguments, and returns None for a call that has to stay one of the operator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from pt2mx.kernels.cpu.prepared import (
    PreparedActivation,
    PreparedAttention,
    PreparedDecodingAttention,
    PreparedLinear,
)
from pt2mx.spec import MXSpec

__all__ = ["activation_fake_quantize_mx", "attention_mx", "decoding_attention", "linear_mx"]

Box = ir.TensorBox
Shape = tuple[int, ...]


class PreparedCallNode(ir.ExternKernelOut):
    """A call of an object that the module of the generated code makes once, for all calls with the same arguments.

    Args:
        layout: of the result.
        inputs: the tensors of a call.
        kind: the class of the object.
        made_from: the arguments of the class.
    """

    def __init__(self, layout: ir.Layout, inputs: Sequence[Any], kind: type, made_from: tuple[object, ...]) -> None:
        digest = hashlib.sha256(repr(made_from).encode()).hexdigest()[:8]
        super().__init__(layout, inputs, python_kernel_name=f"{kind.__name__}_{digest}")
        self.lines = f"from {kind.__module__} import {kind.__name__}", f"{kind.__name__}{made_from!r}"

    def codegen(self, wrapper: Any) -> None:
        imported, made = self.lines
        wrapper.add_import_once(imported)
        wrapper.add_import_once(f"{self.python_kernel_name} = {made}")
        super().codegen(wrapper)


def linear_mx(
    x: Box,
    data: Box,
    scale: Box,
    bias: Box | None,
    element: str,
    block_size: int,
    rotation: int,
    target_dtype: torch.dtype | None = None,
    scale_format: str | None = None,
    block_rows: int | None = None,
    tensor_scale: Box | None = None,
) -> Box | None:
    spec = MXSpec(element, block_size, scale_format=scale_format or "e8m0", block_rows=block_rows or 1)
    shapes, dtypes = _shapes(x, data, scale), (x.get_dtype(), target_dtype or x.get_dtype())
    if shapes is None or not _is_plain(spec) or tensor_scale is not None:
        return None
    options = element, block_size, rotation
    return _call(PreparedLinear, [x, data, scale, bias], (*shapes, *dtypes, *options), (*shapes[0][:-1], shapes[1][0]))


def activation_fake_quantize_mx(
    x: Box,
    activation: str,
    element: str,
    block_size: int,
    scale_mode: str,
    rounding: str,
    target_dtype: torch.dtype | None = None,
) -> Box | None:
    shapes, dtypes = _shapes(x), (x.get_dtype(), target_dtype or x.get_dtype())
    if shapes is None or not _is_plain(MXSpec(element, block_size)):
        return None
    options = activation, element, block_size, scale_mode, rounding
    return _call(PreparedActivation, [x], (*shapes, *dtypes, *options), shapes[0])


def attention_mx(
    query: Box,
    key_data: Box,
    key_scale: Box,
    value_data: Box,
    value_scale: Box,
    element: str,
    block_size: int,
    value_width: int,
    mask: Box | None = None,
    scale: float | None = None,
    scale_format: str | None = None,
    key_tensor_scale: Box | None = None,
    value_tensor_scale: Box | None = None,
) -> Box | None:
    cache = key_data, key_scale, value_data, value_scale
    has_tensor_scale = key_tensor_scale is not None or value_tensor_scale is not None
    spec = MXSpec(element, block_size, scale_format=scale_format or "e8m0")
    shapes = _of_one_slot(query, cache, mask)
    if shapes is None or not _is_plain(spec) or has_tensor_scale:
        return None
    of_query, of_cache, of_mask = shapes
    options = query.get_dtype(), element, block_size, value_width, None if scale is None else float(scale)
    made_from = of_query, *of_cache, of_mask, *options
    return _call(PreparedAttention, [query, *cache, mask], made_from, (*of_query[:3], value_width))


def decoding_attention(
    query: Box, keys: Box, values: Box, mask: Box | None, scale: float | None, zeros: Box | None
) -> Box | None:
    shapes = _of_one_slot(query, (keys, values), mask)
    if shapes is None:
        return None
    of_query, of_cache, of_mask = shapes
    made_from = of_query, *of_cache, of_mask, query.get_dtype(), None if scale is None else float(scale)
    out = *of_query[:3], of_cache[1][3]
    return _call(PreparedDecodingAttention, [query, keys, values, mask], made_from, out)


def _of_one_slot(
    query: Box, cache: Sequence[Box], mask: Box | None
) -> tuple[Shape, tuple[Shape, ...], Shape | None] | None:
    """Return the shapes of the query, the cache and the mask with one slot, whose number a call tells; None as
    `_shapes` does, and where all slots share a mask."""
    slots, of_mask = cache[0].get_size()[2], None if mask is None else mask.get_size()
    if of_mask is not None and V.graph.sizevars.statically_known_true(sympy.Eq(of_mask[3], 1)) and slots != 1:
        return None  # it broadcasts; a call compares other sizes
    sizes = [query.get_size(), *([*size[:2], 1, *size[3:]] for size in (one.get_size() for one in cache))]
    shapes = _known([query, *cache], [*sizes, *([] if of_mask is None else [[*of_mask[:3], 1]])])
    if shapes is None:
        return None
    of_query, *of_cache = shapes
    return of_query, tuple(of_cache[: len(cache)]), None if of_mask is None else of_cache[-1]


def _is_plain(spec: MXSpec) -> bool:
    return spec.has_plain_scale and not spec.element.is_wide


def _shapes(*tensors: Box) -> list[Shape] | None:
    """Return the shapes of tensors of the CPU; None where a size is unknown, and for calls of a C++ wrapper."""
    return _known(tensors, [tensor.get_size() for tensor in tensors])


def _known(tensors: Sequence[Box], sizes: Sequence[Sequence[Any]]) -> list[Shape] | None:
    is_known = all(isinstance(n, int) or n.is_number for size in sizes for n in size)
    if V.graph.cpp_wrapper or not is_known or any(t.get_device_or_error().type != "cpu" for t in tensors):
        return None
    return [tuple(map(int, size)) for size in sizes]


def _call(kind: type, tensors: Sequence[Box | None], made_from: tuple[Any, ...], shape: tuple[int, ...]) -> Box | None:
    """Return the result, of a shape, of a prepared call of tensors; None where it is not supported."""
    if not kind(*made_from).is_supported:
        return None
    given = [tensor for tensor in tensors if tensor is not None]
    dtype = next(one for one in reversed(made_from) if isinstance(one, torch.dtype))  # the last one is the result's
    layout = ir.FixedLayout(given[0].get_device_or_error(), dtype, list(shape))
    inputs = [ir.ExternKernel.require_contiguous(tensor) for tensor in given]
    return Box.create(PreparedCallNode(layout, inputs, kind, made_from))
