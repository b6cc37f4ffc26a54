"""pt2mx itself: each backend by every scale mode. It must have no deviation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pt2mx.conformance.adapters.case import Case
from pt2mx.errors import MXError
from pt2mx.formats import FORMATS
from pt2mx.kernels import reference_chunked
from pt2mx.kernels.cpu import build
from pt2mx.kernels.cpu import quantize as cpu
from pt2mx.modes import scale_modes
from pt2mx.ops.quantization import Dequantize, Quantize
from pt2mx.scale_formats import SCALE_FORMATS
from pt2mx.spec import MXSpec


def torch_cases() -> Iterator[Case]:
    """Yield the cases of the reference kernel, plain torch operations."""
    return _cases(reference_chunked.quantize, reference_chunked.dequantize)


def cpp_cases() -> Iterator[Case]:
    """Yield the cases of the C++ kernel.

    Raises:
        MXError: if no compiler has built it.
    """
    if not build.is_available():
        raise MXError("the C++ kernels are not built: see `pt2mx doctor`")
    return _cases(_quantize_on_cpu, _dequantize_on_cpu)


def _cases(quantize: Callable[..., Any], dequantize: Callable[..., Any]) -> Iterator[Case]:
    for name, element in FORMATS.items():
        for mode in scale_modes(SCALE_FORMATS["e8m0"], element):
            spec = MXSpec(name, axis=1, scale_mode=mode)
            of_data = partial(_dequantize, dequantize, spec)
            yield Case(name, partial(_quantize, quantize, spec), of_data, mode, "even", "low_first", False)


def _quantize(quantize: Callable[..., Any], spec: MXSpec, x: Tensor) -> tuple[Tensor, Tensor]:
    return quantize(x, spec, None)


def _dequantize(dequantize: Callable[..., Any], spec: MXSpec, data: Tensor, scale: Tensor) -> Tensor:
    return dequantize(data, scale, spec, torch.float32, data.shape[1] * 8 // spec.element.bits)


def _quantize_on_cpu(x: Tensor, spec: MXSpec, seed: None) -> Any:
    return cpu.quantize(Quantize(x, *spec.quantize_args(), seed), spec)


def _dequantize_on_cpu(data: Tensor, scale: Tensor, spec: MXSpec, dtype: torch.dtype, length: int) -> Any:
    call = Dequantize(data, scale, spec.element.name, spec.block_size, dtype, spec.axis, length)
    return cpu.dequantize(call, spec, length)
