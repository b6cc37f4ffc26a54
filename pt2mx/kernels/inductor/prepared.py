"""Inductor's lowering of operators to calls of `pt2mx.kernels.cpu.prepared`, which write to buffers of Inductor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V

from pt2mx.kernels.cpu import prepared
from pt2mx.spec import MXSpec

__all__ = ["linear_mx"]


class PreparedCall(ir.ExternKernelOut):
    """A call of an object that the module of the generated code makes once, for all calls with the same arguments."""

    def __init__(
        self, layout: ir.Layout, inputs: Sequence[ir.IRNode], name: str, made_from: tuple[object, ...]
    ) -> None:
        super().__init__(layout, inputs, python_kernel_name=name)
        self.made_from = made_from

    def codegen(self, wrapper: Any) -> None:
        kind = prepared.PreparedLinear
        wrapper.add_import_once(f"from {kind.__module__} import {kind.__name__}")
        wrapper.add_import_once(f"{self.python_kernel_name} = {kind.__name__}{self.made_from!r}")
        super().codegen(wrapper)


def linear_mx(
    x: ir.TensorBox,
    data: ir.TensorBox,
    scale: ir.TensorBox,
    bias: ir.TensorBox | None,
    element: str,
    block_size: int,
    rotation: int,
    target_dtype: torch.dtype | None = None,
    scale_format: str | None = None,
    block_rows: int | None = None,
    tensor_scale: ir.TensorBox | None = None,
) -> ir.TensorBox | None:
    """Return the result of a prepared call; None for a call that has to stay one of the operator."""
    shape, n, device = x.get_size(), data.get_size()[0], x.get_device_or_error()
    spec = MXSpec(element, block_size, scale_format=scale_format or "e8m0", block_rows=block_rows or 1)
    is_plain = spec.has_plain_scale and tensor_scale is None and not spec.element.is_wide
    is_known = all(isinstance(size, int) or size.is_number for size in (*shape, n))
    if device.type != "cpu" or V.graph.cpp_wrapper or not is_plain or not is_known:
        return None
    shape, n = tuple(map(int, shape)), int(n)
    rows = torch.Size(shape[:-1]).numel()
    if not prepared.PreparedLinear.supports(rows, rotation) or 0 in (*shape, n):
        return None
    x_dtype, dtype = x.get_dtype(), target_dtype or x.get_dtype()
    tensors = [ir.ExternKernel.require_contiguous(tensor) for tensor in (x, data, scale, bias) if tensor is not None]
    layout = ir.FixedLayout(device, dtype, [*shape[:-1], n])
    made_from = shape, n, x_dtype, dtype, element, block_size, rotation
    words = [*map(str, (*shape, n)), *(str(one).removeprefix("torch.") for one in made_from[2:])]
    return ir.TensorBox.create(PreparedCall(layout, tensors, "linear_mx_" + "_".join(words), made_from))
