"""Sums of quantization errors on the CPU, in C++ (`src/error_sums.cpp`): one pass over memory, on torch's threads."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pt2mx.kernels.cpu.build import DTYPES, run
from pt2mx.kernels.cpu.calls import ErrorSums, ErrorSumsCall
from pt2mx.spec import MXSpec

__all__ = ["error_sums"]


def error_sums(x: Tensor, y: Tensor, scale: Tensor, spec: MXSpec) -> tuple[Tensor, ...] | None:
    if spec.block_rows > 1 or x.dtype not in DTYPES or y.dtype != x.dtype:
        return None
    x, y, scale, sums = x.contiguous(), y.contiguous(), scale.contiguous(), ErrorSums()
    n = x.shape[spec.axis]
    call = ErrorSumsCall(
        dtype=DTYPES.index(x.dtype),
        low=spec.element.lowest,
        high=spec.element.max_normal,
        outer=x.shape[: spec.axis].numel(),
        n=n,
        inner=x.shape[spec.axis + 1 :].numel(),
        block=min(spec.block_size, n),
        x=x.data_ptr(),
        y=y.data_ptr(),
        scale=scale.data_ptr(),
        sums=ctypes.addressof(sums),
    )
    if x.numel():
        run("pt2mx_error_sums", call)
    dtypes = {"nonfinite": torch.int64, "saturated": torch.int64, "flushed": torch.int64}
    dtypes |= {"signal": torch.float64, "noise": torch.float64}
    return tuple(torch.tensor(getattr(sums, name), dtype=dtype, device="cpu") for name, dtype in dtypes.items())
