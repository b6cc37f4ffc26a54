"""The choice of the kernels that serve an eager call.

Every kernel module has the functions of `pt2mx.kernels.reference_chunked`, takes inputs of any strides and at least one
dimension, and gives contiguous outputs; all agree to the bit. Products choose in `pt2mx.ops.linear`.
"""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from pt2mx.formats import ElementFormat
from pt2mx.kernels import reference_chunked
from pt2mx.kernels.cpu import quantize as cpu

__all__ = ["device_with_kernels", "kernels_for", "rotate", "runs_triton"]

#: type of device -> module with the twin of `pt2mx.kernels.hadamard.rotate`
_ROTATIONS = {"cpu": "cpu.hadamard", "cuda": "gpu.hadamard"}


def kernels_for(x: Tensor, element: ElementFormat | None = None) -> ModuleType:
    """The fastest kernels that can work on x, and with `element` where the call has one."""
    device = device_with_kernels(x, element)
    if device == "cpu":
        return cpu
    if device == "cuda":
        from pt2mx.kernels.gpu import quantize as gpu

        return gpu
    return reference_chunked


def rotate(x: Tensor, size: int, axis: int = -1) -> Tensor:
    """Return `pt2mx.kernels.hadamard.rotate(x, size, axis)`, by the fastest kernel that can work on x."""
    module = _ROTATIONS.get(device_with_kernels(x) or "", "hadamard")
    return importlib.import_module(f"pt2mx.kernels.{module}").rotate(x, size, axis)


def device_with_kernels(x: Tensor, element: ElementFormat | None = None) -> str | None:
    """Return the type of x's device, "cpu" or "cuda", if there are kernels of our own that can work on x there; else
    None, and torch's operators serve."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided and not torch.compiler.is_compiling()
    if plain and not (element and element.is_wide):
        if x.device.type == "cpu" and cpu.is_available():
            return "cpu"
        if x.device.type == "cuda" and runs_triton(x.device):
            return "cuda"
    return None


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """True if Triton's kernels work on the device."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
