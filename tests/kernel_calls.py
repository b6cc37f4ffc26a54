"""Kernels by arguments and specs: each function here returns a call of an operator, and what its `check` returns."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pt2mx import MXSpec
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.activations import ActivationFakeQuantize, LayerNormFakeQuantize
from pt2mx.ops.attention import AttentionBfloat16, MatmulBfloat16
from pt2mx.ops.convolution import Conv2dMX
from pt2mx.ops.fp8_rowwise import LayerNormFP8Rows, MmFP8Rows, QuantizeFP8Rows
from pt2mx.ops.hadamard import RotatedFakeQuantize
from pt2mx.ops.linear import GroupedLinearMX, LinearMX, LinearMXMMALayout
from pt2mx.ops.quantization import ClipGradient, Dequantize, FakeQuantize, Quantize
from pt2mx.ops.quantize_epilogue import LinearFakeQuantize
from pt2mx.ops.stochastic import RandomBits

_Call = tuple[Any, ...]
_Tensor = Tensor | None


class ByArguments:
    """Kernels that take the arguments of the functions here.

    Args:
        module: of the kernels; None for those that the device selects, and else the definition.
    """

    def __init__(self, module: ModuleType | None) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        of_rows = self.module is not None and self.module.__name__.endswith("fp8_rowwise")
        make = _FP8_ROWS[name] if of_rows else globals()[name]
        if self.module is None:
            return lambda *args: run_kernel(*make(*args))
        return lambda *args, **named: getattr(self.module, name)(*make(*args, **named))


selected = ByArguments(None)


def quantize(x: Tensor, spec: MXSpec, seed: _Tensor = None, tensor_scale: _Tensor = None) -> _Call:
    return Quantize(x, spec, seed, tensor_scale), spec


def fake_quantize(x: Tensor, spec: MXSpec, seed: _Tensor = None, tensor_scale: _Tensor = None) -> _Call:
    return FakeQuantize(x, spec, seed, "identity", tensor_scale), spec


def clip_gradient(grad: Tensor, x: Tensor, spec: MXSpec, tensor_scale: _Tensor = None) -> _Call:
    return ClipGradient(grad, x, spec, tensor_scale), spec


def dequantize(
    data: Tensor, scale: Tensor, spec: MXSpec, dtype: torch.dtype, length: int, tensor_scale: _Tensor = None
) -> _Call:
    return Dequantize(data, scale, spec, dtype, length, tensor_scale), spec, length


def random_bits(seed: Tensor, shape: Sequence[int]) -> _Call:
    return (RandomBits(seed, shape),)


def rotated_fake_quantize(x: Tensor, size: int, spec: MXSpec, dtype: torch.dtype | None = None) -> _Call:
    return RotatedFakeQuantize(x, size, spec, dtype), spec, dtype or x.dtype


def linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: _Tensor,
    spec: MXSpec,
    rotation: int = 0,
    dtype: torch.dtype | None = None,
    tensor_scale: _Tensor = None,
) -> _Call:
    return LinearMX(x, data, scale, bias, spec, rotation, dtype, tensor_scale), spec, dtype or x.dtype


def grouped_linear(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    offs: Tensor,
    spec: MXSpec,
    dtype: torch.dtype | None = None,
    tensor_scale: _Tensor = None,
) -> _Call:
    of_call = spec.replace(axis=-1)  # its schema names no axis
    return GroupedLinearMX(x, data, scale, offs, of_call, dtype, tensor_scale), spec, dtype or x.dtype


def linear_mma_layout(
    x: Tensor, codes: Tensor, scale: Tensor, bias: _Tensor, element: Any, n: int, rotation: int = 0, t: _Tensor = None
) -> _Call:
    return (LinearMXMMALayout(x, codes, scale, bias, element.name, n, rotation, t),)


def linear_fake_quantize(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: _Tensor,
    spec: MXSpec,
    product_dtype: torch.dtype,
    activation: str,
    quantization: MXSpec,
    dtype: torch.dtype,
) -> _Call:
    call = LinearFakeQuantize(x, data, scale, bias, spec, product_dtype, activation, quantization, dtype)
    return call, spec, product_dtype, quantization, dtype


def conv2d(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    bias: _Tensor,
    spec: MXSpec,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    dtype: torch.dtype,
) -> _Call:
    return Conv2dMX(x, data, scale, bias, spec, stride, padding, dilation, dtype), spec, dtype


def activation_fake_quantize(x: Tensor, activation: str, spec: MXSpec, dtype: torch.dtype) -> _Call:
    return ActivationFakeQuantize(x, activation, spec, dtype), spec, dtype


def layer_norm_fake_quantize(
    x: Tensor, residual: _Tensor, weight: _Tensor, bias: _Tensor, eps: float, spec: MXSpec, dtype: torch.dtype
) -> _Call:
    return LayerNormFakeQuantize(x, residual, weight, bias, eps, spec, dtype), spec, dtype


def matmul(x: Tensor, y: Tensor) -> _Call:
    return (MatmulBfloat16(x, y, torch.float32),)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: _Tensor,
    is_causal: bool,
    scale: float | None,
    dtype: torch.dtype = torch.float32,
    spec: MXSpec | None = None,
    out_dtype: torch.dtype | None = None,
) -> _Call:
    call = AttentionBfloat16(query, key, value, mask, is_causal, scale, dtype, spec, out_dtype)
    return call, dtype, spec, out_dtype or dtype


def _quantize_fp8_rows(x: Tensor, spec: MXSpec, activation: str) -> _Call:
    return QuantizeFP8Rows(x, spec, activation), spec


def _layer_norm_fp8_rows(
    x: Tensor, residual: _Tensor, weight: _Tensor, bias: _Tensor, eps: float, spec: MXSpec
) -> _Call:
    return LayerNormFP8Rows(x, residual, weight, bias, eps, spec), spec


def _mm_fp8_rows(*args: _Tensor) -> _Call:
    return (MmFP8Rows(*args),)


#: of kernels that have the names of others
_FP8_ROWS = {"quantize": _quantize_fp8_rows, "layer_norm_quantize": _layer_norm_fp8_rows, "mm": _mm_fp8_rows}
