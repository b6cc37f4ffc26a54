"""The operators as functions of aten operators, which compilers and processes without pt2mx understand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from pt2mx.kernels import elements, float_scales, reference
from pt2mx.kernels.float_scales import has_each
from pt2mx.kernels.packing import is_one_in_the_example
from pt2mx.ops.contract import OPERATORS
from pt2mx.ops.memory_format import (
    Order,
    contiguous_order,
    dense_strides,
    inverse_permute,
    is_dense,
    order_in_memory,
    strides_in_order,
)
from pt2mx.ops.operator import Operator
from pt2mx.ops.quantization import ClipGradient, Dequantize, FakeQuantize, Quantize, scale_of_tensor
from pt2mx.ops.stochastic import seed_of
from pt2mx.ops.tensor_scale import TensorScale
from pt2mx.spec import MXSpec


def _contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def decompositions(
    random_bits: Callable[[Tensor, torch.Size], Tensor],
    prims_for: Callable[[Tensor], ModuleType] = lambda x: elements,
    dense: Callable[[Tensor], Tensor] = _contiguous_copy,
    fake_quantize: Callable[..., Tensor] = reference.fake_quantize,
) -> dict[OpOverload, Callable[..., Any]]:
    """Return operator -> its decomposition, by the reference kernels.

    Args:
        random_bits: the numbers of stochastic rounding, as `pt2mx.kernels.reference.random_bits`.
        prims_for: the module with the functions of `pt2mx.kernels.elements` that suits a tensor.
        dense: gives the values of a tensor contiguous strides, for tracing at least.
        fake_quantize: a function for `pt2mx.kernels.reference.fake_quantize` that gives the same bits.
    """
    by = _Decompositions(random_bits, prims_for, dense, fake_quantize)
    of_operator: dict[type[Operator], Callable[..., Any]] = {
        Quantize: by.quantize,
        Dequantize: by.dequantize,
        FakeQuantize: by.fake_quantize,
        ClipGradient: by.clip_gradient,
        TensorScale: by.tensor_scale,
    }
    return {operator.overload: operator.function(_unless_registered(f)) for operator, f in of_operator.items()}


def _unless_registered(decompose: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decomposition that leaves calls of registered elements and scale modes: compiled code may be kept for
    another process, which may register other numbers under the same name."""
    return lambda call: NotImplemented if call.spec.is_registered else decompose(call)


@dataclass(frozen=True)
class _Decompositions:
    """The decompositions of the operators, by the functions that `decompositions` takes."""

    random_bits: Callable[[Tensor, torch.Size], Tensor]
    prims_for: Callable[[Tensor], ModuleType]
    dense: Callable[[Tensor], Tensor]
    fake_quantize_blocks: Callable[..., Tensor]

    def quantize(self, call: Quantize[Tensor]) -> tuple[Tensor, ...]:
        spec, x, prims, t = call.check(), torch.atleast_1d(call.x), self.prims_for(call.x), call.tensor_scale
        random = self._random(x, spec, call.seed)
        return self._in_order(lambda spec, x, r=None: reference.quantize(x, spec, r, prims, t), spec, x, *random)

    def dequantize(self, call: Dequantize[Tensor]) -> Tensor:
        (spec, length), prims = call.check(), self.prims_for(call.codes)

        def kernel(spec: MXSpec, data: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
            return (reference.dequantize(data, scale, spec, call.dtype, length, prims, call.tensor_scale),)

        by_position = spec.block_rows > 1 or has_each(call.tensor_scale)
        return self._in_order(kernel, spec, call.codes, call.scale, by_position=by_position)[0]

    def fake_quantize(self, call: FakeQuantize[Tensor]) -> Tensor:
        spec, x, prims = call.check(), torch.atleast_1d(call.x), self.prims_for(call.x)
        t = scale_of_tensor(call, spec) if spec.has_tensor_scale else None

        def kernel(spec: MXSpec, x: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
            return (self.fake_quantize_blocks(x, spec, random, prims, t),)

        (y,) = self._in_order(kernel, spec, x, *self._random(x, spec, call.seed))
        return y if call.x.dim() else y.reshape(())

    def clip_gradient(self, call: ClipGradient[Tensor]) -> Tensor:
        spec, prims = call.check(), self.prims_for(call.x)
        operands, t = (
            (torch.atleast_1d(call.x), torch.atleast_1d(call.grad)),
            scale_of_tensor(call, spec) if spec.has_tensor_scale else None,
        )
        (y,) = self._in_order(lambda spec, x, g: (reference.clip_gradient(g, x, spec, prims, t),), spec, *operands)
        return y if call.x.dim() else y.reshape(())

    def tensor_scale(self, call: TensorScale[Tensor]) -> Tensor:
        return float_scales.tensor_scale(call.x, call.check(), self.prims_for(call.x))

    def _random(self, x: Tensor, spec: MXSpec, seed: int | None) -> tuple[Tensor, ...]:
        """Return the random numbers that rounding x takes: one tensor, or none."""
        seed_tensor = seed_of(x, spec, seed)
        return () if seed_tensor is None else (self.random_bits(seed_tensor, x.shape),)

    def _in_order(
        self,
        kernel: Callable[..., tuple[Tensor, ...]],
        spec: MXSpec,
        x: Tensor,
        *others: Tensor,
        by_position: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return what `kernel(spec, x, *others)` gives, with the strides that the operator's fake kernel tells: by
        these, views of it were traced. `others` have x's dimensions. `by_position`: the kernel goes by the position of
        a dimension in x, as it does for blocks of several rows."""
        order = order_in_memory(x)
        if order == contiguous_order(x):
            results = kernel(spec, x, *others)
        elif by_position or spec.block_rows > 1:
            results = tuple(y.permute(order) for y in kernel(spec, x, *others))
            spec = spec.replace(block_rows=1, axis=order.index(spec.axis))
        else:
            spec = spec.replace(axis=order.index(spec.axis))
            results = kernel(spec, *(t.permute(order) for t in (x, *others)))
        return tuple(self._laid_out(y, order, spec.axis, x) for y in results)

    def _laid_out(self, y: Tensor, order: Order, axis: int, x: Tensor) -> Tensor:
        """Return y, whose dimensions are in x's order, as a result for x: dense, also where filled last blocks along
        `axis` were cut off. Scales and codes whose length is one in the example do not change where nothing would
        guard that length."""
        is_cut = not is_dense(y, contiguous_order(y))
        left = is_cut and is_one_in_the_example(y.shape[axis])
        y = self.dense(y) if is_cut and not left else y
        y = y if order == contiguous_order(y) else inverse_permute(y, order)
        strides = list(zip(dense_strides(y.shape, order), strides_in_order(x, y.shape), strict=True))
        same = all(a == b for a, b in strides if isinstance(a, int) and isinstance(b, int))
        return y if left or same else y.as_strided(y.shape, [stride for _, stride in strides])


def call_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return operator -> its decomposition, of those that Inductor keeps as calls, for programs that run where pt2mx is
    not installed. Matmuls multiply with the dequantized weight."""
    return {
        operator.overload: operator.function(operator.decompose)
        for operator in OPERATORS.values()
        if hasattr(operator, "decompose")
    }
