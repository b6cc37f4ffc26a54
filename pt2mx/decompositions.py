"""The operators as functions of aten operators, which compilers and processes without pt2mx understand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx import fragments, linear, ops
from pt2mx.checks import check_input, check_packed
from pt2mx.formats import FORMATS
from pt2mx.kernels import elements, reference
from pt2mx.kernels.gpu_fragments import from_fragments


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


def product_decompositions() -> dict:
    """operator -> the product with the dequantized weight, for programs that run where pt2mx is not installed. Inductor
    keeps these operators as calls: they read the weight packed."""

    def weight(x, data, scale, elem, block_size):
        return ops.dequantize_mx(data, scale, elem, block_size, x.dtype, -1, x.shape[-1])

    def linear_mx(x, data, scale, bias, elem, block_size):
        return functional.linear(x, weight(x, data, scale, elem, block_size), bias)

    def grouped_linear_mx(x, data, scale, offs, elem, block_size):
        experts = weight(x, data, scale, elem, block_size)  # (E, N, K)
        if x.dtype == torch.bfloat16:
            return torch._grouped_mm(x, experts.transpose(-2, -1), offs=offs)
        # torch traces its product in bfloat16 alone: here each expert gets every row
        row = torch.arange(x.shape[0], device=x.device)
        expert = torch.searchsorted(offs, row, right=True, out_int32=True)  # (T,)
        y = x.new_zeros(x.shape[0], experts.shape[1])
        for i, each in enumerate(experts.unbind()):
            y = torch.where((expert == i).unsqueeze(-1), functional.linear(x, each), y)
        return y

    def linear_mx_fragments(x, data, scale, bias, elem, n):
        return functional.linear(x, from_fragments(data, scale, FORMATS[elem], n, x.shape[-1]), bias)

    return {
        linear.linear_mx: linear_mx,
        linear.grouped_linear_mx: grouped_linear_mx,
        fragments.linear_mx_fragments: linear_mx_fragments,
    }
