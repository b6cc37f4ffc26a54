"""The operators as functions of aten operators, which compilers and processes without pt2mx understand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from pt2mx import ops
from pt2mx.kernels import elements, reference
from pt2mx.kernels.axis import is_one_in_the_example
from pt2mx.kernels.hadamard import rotate
from pt2mx.ops import (
    attention,
    bfloat16_products,
    convolution,
    hadamard,
    linear,
    quantized_convolution,
    quantized_linear,
    rotated_quantization,
)
from pt2mx.ops.activation_decompositions import ACTIVATION_DECOMPOSITIONS
from pt2mx.ops.memory_format import (
    Order,
    contiguous_order,
    dense_strides,
    inverse_permute,
    is_dense,
    order_in_memory,
    strides_in_order,
)
from pt2mx.ops.quantization import ClipGradient, Dequantize, FakeQuantize, Quantize, seed_of
from pt2mx.ops.quantized_activations import activation_fake_quantize_mx
from pt2mx.spec import MXSpec


def _contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def decompositions(
    random_bits: Callable[[Tensor, torch.Size], Tensor],
    prims_for: Callable[[Tensor], ModuleType] = lambda x: elements,
    dense: Callable[[Tensor], Tensor] = _contiguous_copy,
) -> dict[OpOverload, Callable[..., Any]]:
    """Return operator -> its decomposition, by the reference kernels.

    Args:
        random_bits: the numbers of stochastic rounding, as `pt2mx.kernels.philox.random_bits`.
        prims_for: the module with the functions of `pt2mx.kernels.elements` that suits a tensor.
        dense: gives the values of a tensor contiguous strides, for tracing at least.
    """
    by = _Decompositions(random_bits, prims_for, dense)
    return {
        Quantize.overload: Quantize.function(by.quantize),
        Dequantize.overload: Dequantize.function(by.dequantize),
        FakeQuantize.overload: FakeQuantize.function(by.fake_quantize),
        ClipGradient.overload: ClipGradient.function(by.clip_gradient),
    }


@dataclass(frozen=True)
class _Decompositions:
    """The decompositions of the operators, by the three functions that `decompositions` takes."""

    random_bits: Callable[[Tensor, torch.Size], Tensor]
    prims_for: Callable[[Tensor], ModuleType]
    dense: Callable[[Tensor], Tensor]

    def quantize(self, call: Quantize[Tensor]) -> tuple[Tensor, ...]:
        spec, x, prims = call.check(), torch.atleast_1d(call.x), self.prims_for(call.x)

        def kernel(spec: MXSpec, x: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
            return reference.quantize(x, spec, random, prims)

        return self._in_order(kernel, spec, x, *self._random(x, spec, call.seed))

    def dequantize(self, call: Dequantize[Tensor]) -> Tensor:
        (spec, length), prims = call.check(), self.prims_for(call.codes)

        def kernel(spec: MXSpec, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
            return (reference.dequantize(data, scale, spec, call.dtype, length, prims),)

        return self._in_order(kernel, spec, call.codes, call.scale)[0]

    def fake_quantize(self, call: FakeQuantize[Tensor]) -> Tensor:
        spec, x, prims = call.check(), torch.atleast_1d(call.x), self.prims_for(call.x)

        def kernel(spec: MXSpec, x: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
            return (reference.fake_quantize(x, spec, random, prims),)

        (y,) = self._in_order(kernel, spec, x, *self._random(x, spec, call.seed))
        return y if call.x.dim() else y.reshape(())

    def clip_gradient(self, call: ClipGradient[Tensor]) -> Tensor:
        spec, prims = call.check(), self.prims_for(call.x)

        def kernel(spec: MXSpec, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
            return (reference.clip_gradient(grad, x, spec, prims),)

        (y,) = self._in_order(kernel, spec, torch.atleast_1d(call.x), torch.atleast_1d(call.grad))
        return y if call.x.dim() else y.reshape(())

    def _random(self, x: Tensor, spec: MXSpec, seed: int | None) -> tuple[Tensor, ...]:
        """Return the random numbers that rounding x takes: one tensor, or none."""
        seed_tensor = seed_of(x, spec, seed)
        return () if seed_tensor is None else (self.random_bits(seed_tensor, x.shape),)

    def _in_order(
        self, kernel: Callable[..., tuple[Tensor, ...]], spec: MXSpec, x: Tensor, *others: Tensor
    ) -> tuple[Tensor, ...]:
        """Return what `kernel(spec, x, *others)` gives, with the strides that the operator's fake kernel tells: by
        these, views of it were traced. `others` have x's dimensions."""
        order = order_in_memory(x)
        if order == contiguous_order(x):
            results = kernel(spec, x, *others)
        else:
            spec = spec.replace(axis=order.index(spec.axis))
            results = kernel(spec, *(t.permute(order) for t in (x, *others)))
        return tuple(self._laid_out(y, order, spec.axis, x) for y in results)

    def _laid_out(self, y: Tensor, order: Order, axis: int, x: Tensor) -> Tensor:
        """Return y, whose dimensions stand in x's order, as a result for x: dense, also where filled last blocks along
        `axis` were cut off. Scales and codes of a length that has one of them in the example stay as they are, where
        nothing would guard that."""
        is_cut = not is_dense(y, contiguous_order(y))
        left = is_cut and is_one_in_the_example(y.shape[axis])
        y = self.dense(y) if is_cut and not left else y
        y = y if order == contiguous_order(y) else inverse_permute(y, order)
        strides = list(zip(dense_strides(y.shape, order), strides_in_order(x, y.shape), strict=True))
        same = all(a == b for a, b in strides if isinstance(a, int) and isinstance(b, int))
        return y if left or same else y.as_strided(y.shape, [stride for _, stride in strides])


def call_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return operator -> its decomposition, of those that Inductor keeps as calls, for programs that run where pt2mx is
    not installed. Products multiply with the dequantized weight."""

    def weight(x: Tensor, data: Tensor, scale: Tensor, elem: str, block_size: int) -> Tensor:
        return ops.dequantize_mx(data, scale, elem, block_size, x.dtype, -1, x.shape[-1])

    def linear_fake_quantize_mx(
        x: Tensor,
        data: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        elem: str,
        block_size: int,
        product_dtype: torch.dtype | None,
        activation: str,
        *modes: Any,
    ) -> Tensor:
        product = linear.LinearMX(x, data, scale, bias, elem, block_size, 0, product_dtype).decompose()
        return ACTIVATION_DECOMPOSITIONS[activation_fake_quantize_mx](product, activation, *modes)

    def conv2d_mx(
        x: Tensor,
        data: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        elem: str,
        block_size: int,
        stride: Sequence[int] = (1, 1),
        padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1),
        target_dtype: torch.dtype | None = None,
    ) -> Tensor:
        x = x.to(target_dtype or x.dtype)
        kernel = weight(x, data, scale, elem, block_size).permute(0, 3, 1, 2)
        y = functional.conv2d(x.permute(0, 3, 1, 2), kernel, bias, stride, padding, dilation)
        return y.permute(0, 2, 3, 1).contiguous()

    def rotated_fake_quantize_mx(
        x: Tensor,
        size: int,
        elem: str,
        block_size: int,
        scale_mode: str = "floor",
        rounding: str = "even",
        target_dtype: torch.dtype | None = None,
    ) -> Tensor:
        y = ops.fake_quantize_mx(rotate(x, size), elem, block_size, -1, scale_mode, rounding)
        return y.to(target_dtype or x.dtype)

    def attention_mx(
        query: Tensor,
        key_data: Tensor,
        key_scale: Tensor,
        value_data: Tensor,
        value_scale: Tensor,
        elem: str,
        block_size: int,
        value_width: int,
        mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        keys = ops.dequantize_mx(key_data, key_scale, elem, block_size, query.dtype, -1, query.shape[-1])
        values = ops.dequantize_mx(value_data, value_scale, elem, block_size, query.dtype, -1, value_width)
        grouped = query.shape[1] != keys.shape[1]
        found = functional.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=grouped)
        return found.contiguous()

    return {
        attention.attention_mx: attention_mx,
        bfloat16_products.matmul_bfloat16: bfloat16_products.dense_matmul,
        bfloat16_products.attention_bfloat16: bfloat16_products.dense_attention,
        linear.linear_mx: linear.LinearMX.function(linear.LinearMX.decompose),
        quantized_linear.linear_fake_quantize_mx: linear_fake_quantize_mx,
        linear.grouped_linear_mx: linear.GroupedLinearMX.function(linear.GroupedLinearMX.decompose),
        linear.linear_mx_mma_layout: linear.LinearMXMMALayout.function(linear.LinearMXMMALayout.decompose),
        convolution.conv2d_mx: conv2d_mx,
        quantized_convolution.conv2d_fake_quantize_mx: functools.partial(
            quantized_convolution.in_two_steps,
            convolve=conv2d_mx,
            quantize=ACTIVATION_DECOMPOSITIONS[activation_fake_quantize_mx],
        ),
        hadamard.hadamard: rotate,
        rotated_quantization.rotated_fake_quantize_mx: rotated_fake_quantize_mx,
        **ACTIVATION_DECOMPOSITIONS,
    }
