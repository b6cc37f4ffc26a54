"""The table of kernels: for each operator the kernel of each type of device.

A kernel takes a call, an `Operator` of `pt2mx.ops` with tensors of any strides and at least one dimension, and what its
`check` returns. Its results are contiguous, and equal the definition's to the bit, except for the order of sums in
matmuls. It returns None for a call that it does not support; then the definition runs, `define` of the call.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from pt2mx.kernels.cpu import build
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from pt2mx.ops.operator import Operator


class Kernel(NamedTuple):
    """The kernel of an operator on a type of device.

    Args:
        function: "module of pt2mx.kernels:function".
        any_scales: True if it looks at the scale format and the rows of a spec, and at tensor scales. The others run
            for E8M0 scales of one row only.
    """

    function: str
    any_scales: bool = False


#: operator -> type of device -> kernel
KERNELS: dict[str, dict[str, Kernel]] = {
    "quantize_mx": {
        "cpu": Kernel("cpu.quantize:quantize", any_scales=True),
        "cuda": Kernel("gpu.quantize:quantize", any_scales=True),
    },
    "dequantize_mx": {
        "cpu": Kernel("cpu.quantize:dequantize", any_scales=True),
        "cuda": Kernel("gpu.quantize:dequantize", any_scales=True),
    },
    "fake_quantize_mx": {
        "cpu": Kernel("cpu.quantize:fake_quantize", any_scales=True),
        "cuda": Kernel("gpu.quantize:fake_quantize", any_scales=True),
    },
    "clip_gradient_mx": {
        "cpu": Kernel("cpu.quantize:clip_gradient", any_scales=True),
        "cuda": Kernel("gpu.quantize:clip_gradient", any_scales=True),
    },
    "random_bits": {"cpu": Kernel("cpu.quantize:random_bits"), "cuda": Kernel("gpu.quantize:random_bits")},
    "hadamard": {"cpu": Kernel("cpu.hadamard:hadamard"), "cuda": Kernel("gpu.hadamard:hadamard")},
    "rotated_fake_quantize_mx": {
        "cpu": Kernel("cpu.quantize:rotated_fake_quantize"),
        "cuda": Kernel("gpu.quantize:rotated_fake_quantize"),
    },
    "activation_fake_quantize_mx": {
        "cpu": Kernel("cpu.activations:activation_fake_quantize"),
        "cuda": Kernel("gpu.activations:activation_fake_quantize"),
    },
    "layer_norm_fake_quantize_mx": {
        "cpu": Kernel("cpu.activations:layer_norm_fake_quantize"),
        "cuda": Kernel("gpu.activations:layer_norm_fake_quantize"),
    },
    "linear_mx": {
        "cpu": Kernel("cpu.linear:linear", any_scales=True),
        "cuda": Kernel("gpu.bf16_matmul:linear", any_scales=True),
    },
    "grouped_linear_mx": {
        "cpu": Kernel("cpu.linear:grouped_linear", any_scales=True),
        "cuda": Kernel("gpu.bf16_matmul:grouped_linear", any_scales=True),
    },
    "linear_mx_mma_layout": {"cuda": Kernel("gpu.linear:linear_mma_layout")},
    "normed_linear_mx": {"cuda": Kernel("gpu.linear:normed_linear")},
    "residual_linear_mx": {"cuda": Kernel("gpu.linear:residual_linear")},
    "linear_fake_quantize_mx": {"cpu": Kernel("cpu.linear:linear_fake_quantize")},
    "conv2d_mx": {"cpu": Kernel("cpu.convolution:conv2d")},
    "conv2d_fake_quantize_mx": {"cpu": Kernel("cpu.convolution:conv2d_fake_quantize")},
    "matmul_bfloat16": {"cpu": Kernel("cpu.bf16_matmul:matmul"), "cuda": Kernel("gpu.bf16_matmul:matmul")},
    "attention_bfloat16": {"cpu": Kernel("cpu.bf16_matmul:attention"), "cuda": Kernel("gpu.bf16_matmul:attention")},
    "rotate_and_store": {"cuda": Kernel("gpu.rope:rotate_and_store")},
    "rotate_quantize_and_store": {"cuda": Kernel("gpu.rope:rotate_quantize_and_store", any_scales=True)},
    "decoding_attention": {
        "cpu": Kernel("cpu.attention:attend_dense"),
        "cuda": Kernel("gpu.attention:attend_dense"),
    },
    "decoding_attention_mx": {"cuda": Kernel("gpu.attention:decode", any_scales=True)},
    "attention_mx": {
        "cpu": Kernel("cpu.attention:attend", any_scales=True),
        "cuda": Kernel("gpu.attention:attend", any_scales=True),
    },
    "store_mx": {"cpu": Kernel("cpu.cache:store")},
    "matmul_accumulated": {
        "cpu": Kernel("cpu.accumulated_matmul:matmul"),
        "cuda": Kernel("gpu.accumulated_matmul:matmul"),
    },
    "scaled_mm_mx": {"cuda": Kernel("gpu.scaled_mm:matmul")},
    "quantize_fp8_rows": {"cuda": Kernel("gpu.fp8_rowwise:quantize")},
    "layer_norm_fp8_rows": {"cuda": Kernel("gpu.fp8_rowwise:layer_norm_quantize")},
    "mm_fp8_rows": {"cuda": Kernel("gpu.fp8_rowwise:mm")},
}

#: step of an algorithm, which is no operator -> its definition, and type of device -> its kernel; both take its
#: arguments
STEPS = {
    "gptq_panel": (
        "gptq_panel:round_panel",
        {"cpu": "cpu.gptq_panel:round_panel", "cuda": "gpu.gptq_panel:round_panel"},
    ),
    "block_scales": ("reference:scales", {"cpu": "cpu.quantize:scales"}),
    "error_sums": ("reference:error_sums", {"cpu": "cpu.quantize:error_sums"}),
}

#: what a pass does -> type of device -> the function that says whether kernels support it there and are faster, of the
#: tensor that they compute and of facts; "" where they always are. Nothing of it is done on other devices
USES: dict[str, dict[str, str]] = {
    "multiply by packed weights": {"cpu": "cpu.uses:multiplies_packed"},
    "multiply quantized x in bfloat16": {"cpu": "cpu.uses:multiplies_in_bfloat16"},
    "multiply x and weights rounded to bfloat16": {"cuda": ""},
    "multiply weights in the MMA layout": {"cuda": "gpu.uses:reads_mma_layout"},
    "multiply FP8 rows": {"cuda": "gpu.uses:has_fp8"},
    "multiply MX on tensor cores": {"cuda": "gpu.uses:has_mx"},
    "multiply activations in bfloat16": {"cpu": "cpu.uses:multiplies_activations", "cuda": ""},
    "attend in bfloat16": {"cpu": "cpu.uses:multiplies_activations", "cuda": "gpu.uses:attends_in_bfloat16"},
    "quantize activations to bfloat16": {"cuda": ""},
    "quantize the result of a matmul": {"cpu": "cpu.uses:quantizes_matmul"},
    "quantize the result of attention": dict.fromkeys(("cpu", "cuda"), "constants:quantizes_attention"),
    "quantize activations": {"cpu": "", "cuda": "gpu.uses:quantizes_rows"},
    "quantize activations alone": {"cpu": ""},
    "convolve packed weights": {"cpu": "cpu.uses:convolves"},
    "attend to new tokens": {"cpu": "cpu.uses:attends", "cuda": "gpu.uses:attends"},
    "attend to codes of new tokens": {"cuda": ""},
    "count programs of attention": {"cuda": ""},
    "attend in any step": {"cpu": ""},
    "store codes of new tokens": {"cpu": ""},
}


def run_kernel(call: Operator[Any], *checked: Any) -> Any:
    """Run the kernel for the device of a call's tensors, or else its definition.

    Args:
        call: of an operator.
        checked: what its `check` returned.
    """
    row = KERNELS[call.name]
    kernel = row.get(_device_of(_tensors_of(type(call))(call)) or "")  # type: ignore[arg-type]  # a type is hashable
    if kernel is not None and _takes(kernel, checked):
        result = _function(kernel.function)(call, *checked)
        if result is not None:
            return result
    return call.define(*checked)


def run_step(step: str, *args: Any) -> Any:
    """Run the kernel of a step for the device of the tensors in `args`, or else its definition."""
    definition, kernels = STEPS[step]
    kernel = kernels.get(_device_of(tuple(arg for arg in args if isinstance(arg, Tensor))) or "")
    result = None
    if kernel is not None and all(arg.has_kernels for arg in args if isinstance(arg, MXSpec)):
        result = _function(kernel)(*args)
    return _function(definition)(*args) if result is None else result


def supports(use: str, value: object, *facts: Any) -> bool:
    """Return whether kernels support a use, and are faster.

    Args:
        use: a key of `USES`.
        value: the tensor, also a fake one, that they compute; None where it is unknown, and nothing supports it.
        facts: what the functions of the use take.
    """
    if not isinstance(value, Tensor) or not all(fact.has_kernels for fact in facts if isinstance(fact, MXSpec)):
        return False
    function = USES[use].get(value.device.type)
    if function is None or not _RUNS[value.device.type](value.device):
        return False
    return not function or _function(function)(value, *facts)


def _takes(kernel: Kernel, checked: tuple[Any, ...]) -> bool:
    """Return whether a kernel takes the specs of a call: elements of at most 8 bits, nothing registered, its scales."""
    for spec in checked:
        if isinstance(spec, MXSpec):
            if not spec.has_kernels or not (kernel.any_scales or spec.has_plain_scale):
                return False
    return True


@functools.cache
def _tensors_of(operator: type[Operator[Any]]) -> Callable[[Operator[Any]], tuple[Any, ...]]:
    """Return what reads the arguments of an operator's calls that are tensors or None, in one call of C."""
    names = [argument.field for argument in operator.arguments if argument.type.startswith("Tensor")]
    return attrgetter(*names) if len(names) > 1 else lambda call: (getattr(call, names[0]),)


def _device_of(tensors: tuple[Any, ...]) -> str | None:
    """Return the type of the device whose kernels support `tensors`: plain dense ones of one device, or None. None
    where torch traces or transforms operators, because it cannot see into a kernel."""
    # while a mode handles an operator, and calls its kernel, it is not on the stack of modes
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack():
        return None
    device = None
    for tensor in tensors:
        if tensor is not None:
            plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
            if not plain or is_functorch_wrapped_tensor(tensor) or tensor.device != (device or tensor.device):
                return None
            device = tensor.device
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
