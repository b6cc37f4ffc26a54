"""The operators as functions of aten operators, which compilers and processes without pt2mx understand."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx import ops
from pt2mx.formats import ELEMENTS
from pt2mx.kernels import elements, reference
from pt2mx.kernels.axis import is_one_in_the_example
from pt2mx.kernels.gpu.mma_layout import from_fragments
from pt2mx.ops import linear, mma_layout
from pt2mx.ops.checks import check_input, check_packed
from pt2mx.ops.order import dense_strides, is_dense, natural, order_in_memory, permuted_back, strides_in_order
from pt2mx.ops.quantization import seed_of


def _contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def decompositions(
    random_bits: Callable[[Tensor, list[int]], Tensor],
    forms_for: Callable[[Tensor], ModuleType] = lambda x: elements,
    dense: Callable[[Tensor], Tensor] = _contiguous_copy,
) -> dict:
    """operator -> its decomposition, by the reference kernels.

    Args:
        random_bits: the numbers of stochastic rounding, as `pt2mx.kernels.philox.random_bits`.
        forms_for: the module with the functions of `pt2mx.kernels.elements` that suits a tensor.
        dense: gives the values of a tensor contiguous strides, for tracing at least.
    """

    def in_order(kernel, spec, x, *others):
        """What `kernel(spec, x, *others)` gives, with the strides that the operator's fake kernel tells: by these views
        of it were traced. `others` have x's dimensions."""
        order = order_in_memory(x)
        if order == natural(x):
            results = kernel(spec, x, *others)
        else:
            spec = spec.replace(axis=order.index(spec.axis))
            results = kernel(spec, *(t.permute(order) for t in (x, *others)))
        return tuple(laid_out(y, order, spec.axis, x) for y in results)

    def laid_out(y, order, axis, x):
        """y, whose dimensions stand in x's order, as a result for x: dense, also where filled last blocks along `axis`
        were cut off. Scales and codes of a length that has one of them in the example stay as they are, where nothing
        would guard that."""
        is_cut = not is_dense(y, natural(y))
        left = is_cut and is_one_in_the_example(y.shape[axis])
        y = dense(y) if is_cut and not left else y
        y = y if order == natural(y) else permuted_back(y, order)
        strides = list(zip(dense_strides(y.shape, order), strides_in_order(x, y.shape), strict=True))
        same = all(a == b for a, b in strides if isinstance(a, int) and isinstance(b, int))
        return y if left or same else y.as_strided(y.shape, [stride for _, stride in strides])

    def random(x, spec, seed=None, *ste):
        seed = seed_of(x, spec, seed)
        return () if seed is None else (random_bits(seed, x.shape),)

    def quantize(x, *arguments):
        spec, x, forms = check_input(x, *arguments[:5]), torch.atleast_1d(x), forms_for(x)

        def kernel(spec, x, random=None):
            return reference.quantize(x, spec, random, forms)

        return in_order(kernel, spec, x, *random(x, spec, *arguments[5:]))

    def dequantize(data, scale, elem, block_size, dtype, *where):
        spec, length = check_packed(data, scale, elem, block_size, dtype, *where)
        forms = forms_for(data)

        def kernel(spec, data, scale):
            return (reference.dequantize(data, scale, spec, dtype, length, forms),)

        return in_order(kernel, spec, data, scale)[0]

    def fake_quantize(x, *arguments):
        spec, row, forms = check_input(x, *arguments[:5]), torch.atleast_1d(x), forms_for(x)

        def kernel(spec, x, random=None):
            return (reference.fake_quantize(x, spec, random, forms),)

        (y,) = in_order(kernel, spec, row, *random(row, spec, *arguments[5:]))
        return y if x.dim() else y.reshape(())

    def clip_gradient(grad, x, *modes):
        spec, rows, forms = check_input(x, *modes), (torch.atleast_1d(x), torch.atleast_1d(grad)), forms_for(x)

        def kernel(spec, x, grad):
            return (reference.clip_gradient(grad, x, spec, forms),)

        (y,) = in_order(kernel, spec, *rows)
        return y if x.dim() else y.reshape(())

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
        return functional.linear(x, from_fragments(data, scale, ELEMENTS[elem], n, x.shape[-1]), bias)

    return {
        linear.linear_mx: linear_mx,
        linear.grouped_linear_mx: grouped_linear_mx,
        mma_layout.linear_mx_fragments: linear_mx_fragments,
    }
