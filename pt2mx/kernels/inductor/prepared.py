"""Inductor's lowerings of operators to calls of `pt2mx.kernels.cpu.prepared`, which write to buffers of Inductor.

A lowering takes a call of the operator, and returns None for a call that has to stay one of the operator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from pt2mx.ops.activations import ActivationFakeQuantize
    from pt2mx.ops.attention import AttentionMX
    from pt2mx.ops.decoding import DecodingAttention
    from pt2mx.ops.linear import LinearMX


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


def linear_mx(call: LinearMX[Box]) -> Box | None:
    x, data, scale = call.x, call.codes, call.scale
    shapes, dtypes = _shapes(x, data, scale), (x.get_dtype(), call.target_dtype or x.get_dtype())
    if shapes is None or not _is_plain(call) or call.tensor_scale is not None:
        return None
    made_from = *shapes, *dtypes, call.spec.element.name, call.spec.block_size, call.rotation
    return _call(PreparedLinear, [x, data, scale, call.bias], made_from, (*shapes[0][:-1], shapes[1][0]))


def activation_fake_quantize_mx(call: ActivationFakeQuantize[Box]) -> Box | None:
    x = call.x
    shapes, dtypes = _shapes(x), (x.get_dtype(), call.target_dtype or x.get_dtype())
    if shapes is None or not _is_plain(call):
        return None
    spec = call.spec
    options = call.activation, spec.element.name, spec.block_size, spec.scale_mode, spec.rounding
    return _call(PreparedActivation, [x], (*shapes, *dtypes, *options), shapes[0])


def attention_mx(call: AttentionMX[Box]) -> Box | None:
    query, cache = call.query, (call.key_data, call.key_scale, call.value_data, call.value_scale)
    has_tensor_scale = call.key_tensor_scale is not None or call.value_tensor_scale is not None
    shapes = _of_one_slot(query, cache, call.mask)
    if shapes is None or not _is_plain(call) or not call.spec.has_power_of_two_scale or has_tensor_scale:
        return None
    options = query.get_dtype(), call.spec.element.name, call.spec.block_size, call.value_width, _number(call.scale)
    shape = *shapes[0][:3], call.value_width
    return _call(PreparedAttention, [query, *cache, call.mask], (*shapes, *options), shape)


def decoding_attention(call: DecodingAttention[Box]) -> Box | None:
    query, cache = call.query, (call.keys, call.values)
    shapes = _of_one_slot(query, cache, call.mask)
    if shapes is None:
        return None
    of_query, _, of_values, _ = shapes
    made_from = *shapes, query.get_dtype(), _number(call.scale)
    return _call(PreparedDecodingAttention, [query, *cache, call.mask], made_from, (*of_query[:3], of_values[3]))


def _number(scale: float | None) -> float | None:
    return None if scale is None else float(scale)


def _of_one_slot(query: Box, cache: Sequence[Box], mask: Box | None) -> list[Any] | None:
    """Return the shapes of the query, the cache and the mask, or None for it, with one slot: a call tells their number.
    Return None as `_shapes` does, and where all slots share a mask."""
    sizes = [query.get_size()]
    for tensor in cache:
        size = tensor.get_size()
        sizes.append([*size[:2], 1, *size[3:]])
    if mask is not None:
        slots, size = cache[0].get_size()[2], mask.get_size()
        if slots != 1 and V.graph.sizevars.statically_known_true(sympy.Eq(size[3], 1)):
            return None  # it broadcasts; a call compares other sizes
        sizes.append([*size[:3], 1])
    shapes = _known([query, *cache], sizes)
    if shapes is None or mask is not None:
        return shapes
    return [*shapes, None]


def _is_plain(call: LinearMX[Box] | ActivationFakeQuantize[Box] | AttentionMX[Box]) -> bool:
    return call.spec.has_plain_scale and call.spec.has_kernels


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
