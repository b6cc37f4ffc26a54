"""A panel of GPTQ on the CPU, in C++ (`src/gptq_panel.cpp`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pt2mx.kernels.cpu.build import run
from pt2mx.kernels.cpu.calls import GptqPanelCall
from pt2mx.kernels.cpu.quantize import spec_of
from pt2mx.spec import MXSpec


def round_panel(columns: Tensor, factor: Tensor, scale: Tensor, spec: MXSpec, *bounds: Tensor) -> tuple[Tensor, Tensor]:
    columns, scale, *ends = (tensor.contiguous() for tensor in (columns, scale, *bounds))
    shares = factor.mT.contiguous()
    rounded, errors = torch.empty_like(columns), torch.empty_like(columns)
    if not columns.numel():
        return rounded, errors
    groups, width, n = columns.shape
    low, high = ends or (None, None)
    table = spec_of(spec)
    call = GptqPanelCall(
        spec=ctypes.addressof(table),
        groups=groups,
        width=width,
        n=n,
        columns=columns.data_ptr(),
        shares=shares.data_ptr(),
        scale=scale.data_ptr(),
        low=None if low is None else low.data_ptr(),
        high=None if high is None else high.data_ptr(),
        rounded=rounded.data_ptr(),
        errors=errors.data_ptr(),
    )
    run("pt2mx_gptq_panel", call)
    return rounded, errors
