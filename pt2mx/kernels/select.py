"""The choice of the kernels that serve an eager call.

Every kernel module has the functions of `pt2mx.kernels.reference_chunked`, takes inputs of any strides and at least one
dimension, and gives contiguous outputs; all agree to the bit.
"""

import functools
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.kernels import reference_chunked
from pt2mx.kernels.cpu import quantize as cpu


def kernels_for(x: Tensor, element: ElementFormat | None = None) -> ModuleType:
    """The fastest kernels that can work on x, and with `element` where the call has one."""
    plain = _is_plain(x) and not (element and element.is_wide)
    if plain and x.device.type == "cpu" and cpu.is_available():
        return cpu
    if plain and x.device.type == "cuda" and runs_triton(x.device):
        from pt2mx.kernels.gpu import quantize as gpu

        return gpu
    return reference_chunked


def linear_kernels_for(x: Tensor, element: ElementFormat | None = None) -> ModuleType:
    """The fastest kernels of `linear_mx` and `grouped_linear_mx` that can work on x with weights of `element`."""
    from pt2mx.kernels import dequantize_then_matmul
    from pt2mx.kernels.cpu import linear as cpu_linear

    plain = _is_plain(x) and not (element and element.is_wide)
    if plain and x.device.type == "cpu" and cpu.is_available():
        return cpu_linear
    return dequantize_then_matmul


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided and not torch.compiler.is_compiling()


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """True if Triton's kernels work on the device."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
