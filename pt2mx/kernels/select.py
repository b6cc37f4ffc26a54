"""The table of kernels: for each operator its definition, and the kernel of each type of device.

A kernel takes the arguments of the definition; tensors have any strides and at least one dimension. Its results are
contiguous, and equal the definition's to the bit, except for the order of sums in matmuls. It returns None for a call
that it does not support; then the definition runs.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from pt2mx.kernels.cpu import build
from pt2mx.spec import MXSpec

__all__ = ["ANY_SCALES", "KERNELS", "STEPS", "run_kernel", "runs_triton"]

#: operator -> type of device -> "module of pt2mx.kernels:function"; "any": the definition. Operators without a
#: definition here are defined in `pt2mx.ops`, by other operators. `STEPS` are no operators
KERNELS: dict[str, dict[str, str]] = {
    "quantize_mx": {
        "any": "reference_chunked:quantize",
        "cpu": "cpu.quantize:quantize",
        "cuda": "gpu.quantize:quantize",
    },
    "dequantize_mx": {
        "any": "reference_chunked:dequantize",
        "cpu": "cpu.quantize:dequantize",
        "cuda": "gpu.quantize:dequantize",
    },
    "fake_quantize_mx": {
        "any": "reference_chunked:fake_quantize",
        "cpu": "cpu.quantize:fake_quantize",
        "cuda": "gpu.quantize:fake_quantize",
    },
    "clip_gradient_mx": {
        "any": "reference_chunked:clip_gradient",
        "cpu": "cpu.quantize:clip_gradient",
        "cuda": "gpu.quantize:clip_gradient",
    },
    "tensor_scale_mx": {"any": "float_scales:tensor_scale"},
    "random_bits": {
        "any": "reference:random_bits",
        "cpu": "cpu.quantize:random_bits",
        "cuda": "gpu.quantize:random_bits",
    },
    "hadamard": {
        "any": "hadamard:rotate",
        "cpu": "cpu.hadamard:rotate",
        "cuda": "gpu.hadamard:rotate",
    },
    "gptq_panel": {"any": "gptq_panel:round_panel", "cpu": "cpu.gptq_panel:round_panel"},
    "block_scales": {"any": "reference:scales", "cpu": "cpu.quantize:scales"},
    "error_sums": {"any": "error_sums:error_sums", "cpu": "cpu.error_sums:error_sums"},
    "rotated_fake_quantize_mx": {
        "cpu": "cpu.quantize:rotated_fake_quantize",
        "cuda": "gpu.quantize:rotated_fake_quantize",
    },
    "activation_fake_quantize_mx": {
        "any": "quantized_activations:activation_fake_quantize",
        "cpu": "cpu.activations:activation_fake_quantize",
        "cuda": "gpu.activations:activation_fake_quantize",
    },
    "layer_norm_fake_quantize_mx": {
        "any": "quantized_activations:layer_norm_fake_quantize",
        "cpu": "cpu.activations:layer_norm_fake_quantize",
        "cuda": "gpu.activations:layer_norm_fake_quantize",
    },
    "linear_mx": {
        "any": "dequantize_then_matmul:linear",
        "cpu": "cpu.linear:linear",
        "cuda": "gpu.bf16_matmul:linear",
    },
    "grouped_linear_mx": {
        "any": "dequantize_then_matmul:grouped_linear",
        "cpu": "cpu.linear:grouped_linear",
        "cuda": "gpu.bf16_matmul:grouped_linear",
    },
    "linear_mx_mma_layout": {
        "any": "dequantize_then_matmul:linear_mma_layout",
        "cuda": "gpu.linear:linear_mma_layout",
    },
    "normed_linear_mx": {"any": "decoder_linear:normed_linear", "cuda": "gpu.linear:normed_linear"},
    "residual_linear_mx": {"any": "decoder_linear:residual_linear", "cuda": "gpu.linear:residual_linear"},
    "linear_fake_quantize_mx": {"cpu": "cpu.linear:linear_fake_quantize"},
    "conv2d_mx": {
        "any": "dequantize_then_matmul:conv2d",
        "cpu": "cpu.convolution:conv2d",
    },
    "conv2d_fake_quantize_mx": {"cpu": "cpu.convolution:conv2d_fake_quantize"},
    "matmul_bfloat16": {
        "cpu": "cpu.bf16_matmul:matmul",
        "cuda": "gpu.bf16_matmul:matmul",
    },
    "attention_bfloat16": {
        "cpu": "cpu.bf16_matmul:attention",
        "cuda": "gpu.bf16_matmul:attention",
    },
    "rotate_and_store": {"cuda": "gpu.rope:rotate_and_store"},
    "rotate_quantize_and_store": {"cuda": "gpu.rope:rotate_quantize_and_store"},
    "decoding_attention": {"cpu": "cpu.attention:attend_dense", "cuda": "gpu.attention:attend_dense"},
    "decoding_attention_mx": {"cuda": "gpu.attention:attend"},
    "attention_mx": {
        "any": "dequantize_then_matmul:attend",
        "cpu": "cpu.attention:attend",
        "cuda": "gpu.attention:attend",
    },
    "store_mx": {"cpu": "cpu.cache:store"},
    "scaled_mm_mx": {"any": "scaled_mm:matmul", "cuda": "gpu.scaled_mm:matmul"},
    "quantize_fp8_rows": {"any": "fp8_rowwise:quantize", "cuda": "gpu.fp8_rowwise:quantize"},
    "layer_norm_fp8_rows": {"any": "fp8_rowwise:layer_norm_quantize", "cuda": "gpu.fp8_rowwise:layer_norm_quantize"},
    "mm_fp8_rows": {"any": "fp8_rowwise:mm", "cuda": "gpu.fp8_rowwise:mm"},
}

#: rows of `KERNELS` that are steps of algorithms: no graph calls them
STEPS = {"gptq_panel", "block_scales", "error_sums"}

#: kernels of a device that look at the scale format and rows of a spec, and take its tensor scales as arguments. The
#: others run for E8M0 scales of one row only
ANY_SCALES = {
    f"{device}.quantize:{name}"
    for device in ("cpu", "gpu")
    for name in ("quantize", "dequantize", "fake_quantize", "clip_gradient")
} | {f"{module}:{name}" for module in ("cpu.linear", "gpu.bf16_matmul") for name in ("linear", "grouped_linear")}
ANY_SCALES |= {
    "cpu.gptq_panel:round_panel",
    "cpu.quantize:scales",
    "cpu.error_sums:error_sums",
    "cpu.attention:attend",
    "gpu.attention:attend",
    "gpu.rope:rotate_quantize_and_store",
}


def run_kernel(operator: str, *args: Any) -> Any:
    """Run the kernel for the device of the tensors in `args`, or else the definition. Return None if neither supports
    the call."""
    row = KERNELS[operator]
    kernel = row.get(_device_of(args) or "")
    if kernel is not None and kernel not in ANY_SCALES and not _has_plain_scales(args):
        kernel = None
    result = None if kernel is None else _function(kernel)(*args)
    if result is None and "any" in row:
        return _function(row["any"])(*args)
    return result


def _has_plain_scales(args: tuple[Any, ...]) -> bool:
    """Return whether the specs in `args` have E8M0 scales of one row."""
    return all(arg.has_plain_scale for arg in args if isinstance(arg, MXSpec))


def _device_of(args: tuple[Any, ...]) -> str | None:
    """Return the type of the device whose kernels support `args`: plain dense tensors of one device, and elements of at
    most 8 bits. None where torch traces or transforms operators, because it cannot see into a kernel."""
    # while a mode handles an operator, and calls its kernel, it is not on the stack of modes
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return None
    device = None
    for arg in args:
        if isinstance(arg, Tensor):
            plain = type(arg) in (Tensor, torch.nn.Parameter) and arg.layout == torch.strided
            if not plain or is_functorch_wrapped_tensor(arg) or arg.device != (device or arg.device):
                return None
            device = arg.device
        elif isinstance(arg, MXSpec) and arg.element.is_wide:
            return None
    if device is None or device.type not in _RUNS:
        return None
    return device.type if _RUNS[device.type](device) else None


#: not the function of a row: it is looked up at each call, so that tests can patch it
_module = functools.cache(importlib.import_module)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(_module(f"pt2mx.kernels.{module}"), function)


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Return whether Triton kernels run on the device."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


#: type of device -> whether pt2mx's kernels run on a device of this type
_RUNS: dict[str, Callable[[torch.device], bool]] = {"cpu": lambda _: build.is_available(), "cuda": runs_triton}
