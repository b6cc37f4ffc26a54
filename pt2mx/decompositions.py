"""The operators as functions of aten operators, which compilers and processes without pt2mx understand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from pt2mx import ops
from pt2mx.checks import check_input, check_packed
from pt2mx.kernels import elements, reference


def decompositions(
    random_bits: Callable[[Tensor, list[int]], Tensor], forms_for: Callable[[Tensor], ModuleType] = lambda x: elements
) -> dict:
    """operator -> its decomposition, by the reference kernels.

    Args:
        random_bits: the numbers of stochastic rounding, as `pt2mx.kernels.philox.random_bits`.
        forms_for: the module with the functions of `pt2mx.kernels.elements` that suits a tensor.
    """

    def random(x, spec, seed=None, *ste):
        seed = ops.seed_of(x, spec, seed)
        return None if seed is None else random_bits(seed, x.shape)

    def quantize(x, *arguments):
        spec, x = check_input(x, *arguments[:5]), torch.atleast_1d(x)
        return reference.quantize(x, spec, random(x, spec, *arguments[5:]), forms_for(x))

    def dequantize(data, scale, elem, block_size, dtype, *where):
        spec, length = check_packed(data, scale, elem, block_size, dtype, *where)
        return reference.dequantize(data, scale, spec, dtype, length, forms_for(data))

    def fake_quantize(x, *arguments):
        spec, row = check_input(x, *arguments[:5]), torch.atleast_1d(x)
        return reference.fake_quantize(row, spec, random(row, spec, *arguments[5:]), forms_for(x)).reshape(x.shape)

    def clip_gradient(grad, x, *modes):
        spec, rows = check_input(x, *modes), (torch.atleast_1d(grad), torch.atleast_1d(x))
        return reference.clip_gradient(*rows, spec, forms_for(x)).reshape(x.shape)

    return {
        ops.quantize_mx: quantize,
        ops.dequantize_mx: dequantize,
        ops.fake_quantize_mx: fake_quantize,
        ops.clip_gradient_mx: clip_gradient,
    }
