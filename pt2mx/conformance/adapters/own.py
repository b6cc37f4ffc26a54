"""pt2mx itself: each backend by every scale mode. It must have no deviation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from pt2mx.conformance.adapters.case import Case
from pt2mx.errors import MXError
from pt2mx.formats import FORMATS
from pt2mx.kernels import reference_chunked
from pt2mx.kernels.cpu import build
from pt2mx.kernels.cpu import quantize as cpu
from pt2mx.modes import scale_modes
from pt2mx.scale_formats import SCALE_FORMATS
from pt2mx.spec import MXSpec


def torch_cases() -> Iterator[Case]:
    """Yield the cases of the reference kernel, plain torch operations."""
    return _cases(reference_chunked)


def cpp_cases() -> Iterator[Case]:
    """Yield the cases of the C++ kernel.

    Raises:
        MXError: if no compiler has built it.
    """
    if not build.is_available():
        raise MXError("the C++ kernels are not built: see `pt2mx doctor`")
    return _cases(cpu)


def _cases(kernels: ModuleType) -> Iterator[Case]:
    for name, element in FORMATS.items():
        for mode in scale_modes(SCALE_FORMATS["e8m0"], element):
            spec = MXSpec(name, axis=1, scale_mode=mode)
            quantize = partial(_quantize, kernels, spec)
            yield Case(name, quantize, partial(_dequantize, kernels, spec), mode, "even", "low_first", False)


def _quantize(kernels: ModuleType, spec: MXSpec, x: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.quantize(x, spec, None)


def _dequantize(kernels: ModuleType, spec: MXSpec, data: Tensor, scale: Tensor) -> Tensor:
    return kernels.dequantize(data, scale, spec, torch.float32, data.shape[1] * 8 // spec.element.bits)
