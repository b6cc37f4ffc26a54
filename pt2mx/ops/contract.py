"""The contract of the operators `torch.ops.pt2mx.*` with compilers that read programs with them.

It says for each a version, and the shapes, dtypes and layouts of its arguments. Types and defaults are those of the
registered schemas. `contract_text` writes the document for their authors. An operator's version rises with every change
of its schema or its numbers.
"""

from __future__ import annotations

import torch

from pt2mx.modes import ROUNDINGS, SCALE_MODES
from pt2mx.ops.contract_activations import OF_ACTIVATIONS
from pt2mx.ops.contract_entry import NOT_RANDOM, Operator, choices, declared
from pt2mx.ops.linear import GroupedLinearMX, LinearMX, LinearMXMMALayout
from pt2mx.ops.quantization import ClipGradient, Dequantize, FakeQuantize, Quantize, RandomBits
from pt2mx.ops.scaled_mm import FORMS

#: arguments that mean the same in every operator
SHARED = {
    "elem_dtype_name": "the element, by its name in the table above or another key of `pt2mx.ELEMENTS`",
    "block_size": "values that share a scale, at least 1; the last block along the axis may be shorter",
    "axis": "the dimension along which blocks run and codes are packed",
    "scale_mode": f"how a block's scale follows from its values: {choices(SCALE_MODES)}",
    "rounding": f"how values are rounded: {choices(ROUNDINGS)}",
    "seed": "of `stochastic`, 0 to 2**63 - 1; None draws one from torch's default generator. Other roundings ignore it",
    "weight_data": "(N, bytes of K) uint8, packed along K, which is the axis",
    "weight_scale": "(N, ceil(K / block_size)) uint8, E8M0",
    "bias": "(N,) in x's dtype, or None",
    "rotation": "blocks of x that `hadamard` rotates along K first, rounded to x's dtype; 0 for none",
}
_VALUES = "(..., n, ...) float32, float16 or bfloat16 of any strides, n values along the axis"
_PAIRS = "; ".join(
    f"`{x}` x `{weight}` to {', '.join(str(dtype).removeprefix('torch.') for dtype in form.results)}"
    for (x, weight), form in FORMS.items()
)

OPERATORS = {
    "quantize_mx": declared(Quantize),
    "dequantize_mx": declared(Dequantize),
    "fake_quantize_mx": declared(FakeQuantize),
    "clip_gradient_mx": declared(ClipGradient),
    "random_bits": declared(RandomBits),
    "linear_mx": declared(LinearMX),
    "grouped_linear_mx": declared(GroupedLinearMX),
    "conv2d_mx": Operator(
        1,
        "`conv2d(x, w, bias)` with channels last, where w is `dequantize_mx` of the weight along C in the dtype of the "
        "result; sums are in float32, in any order. x and bias have gradients; autocast casts both to its dtype.",
        {"": "(B, H', W', N) in `target_dtype`, contiguous"},
        {
            "x": "(B, H, W, C) float32, float16 or bfloat16 of any strides",
            "weight_data": "(N, height and width of the kernel, bytes of C) uint8, packed along C, which is the axis",
            "weight_scale": "(N, height and width of the kernel, ceil(C / block_size)) uint8, E8M0",
            "bias": "(N,) in the dtype of the result, or None",
            **dict.fromkeys(("stride", "dilation"), "of height and width, at least 1"),
            "padding": "of height and width, zeros on both sides",
            "target_dtype": "as of `linear_mx`",
        },
    ),
    "linear_mx_mma_layout": declared(LinearMXMMALayout),
    "attention_mx": Operator(
        1,
        "`scaled_dot_product_attention` over a cache of codes: keys and values are `dequantize_mx` of theirs along the "
        "last dimension, in the query's dtype. Each key has the queries of as many heads as there are more of them. "
        "Sums are in float32, in any order; a query that sees no key gives zeros.",
        {"": "(B, heads, S, `value_width`) in the query's dtype"},
        {
            "query": "(B, heads, S, D) float32, float16 or bfloat16",
            "key_data": "(B, heads of the keys, L, bytes of D) uint8, packed along D, which is the axis",
            "key_scale": "(B, heads of the keys, L, ceil(D / block_size)) uint8, E8M0",
            "value_data": "(B, heads of the keys, L, bytes of `value_width`) uint8",
            "value_scale": "(B, heads of the keys, L, ceil(`value_width` / block_size)) uint8, E8M0",
            "value_width": "values of a head",
            "mask": "(B or 1, heads or 1, S, L) booleans, false where a key is hidden from a query; or None",
            "scale": "of the scores; None: D ** -0.5",
        },
    ),
    "hadamard": Operator(
        1,
        "Values, those negated whose index in its block has an odd form b0 b1 + b2 b3 + ... of its bits, times "
        "Sylvester's Hadamard matrix over the square root of `size`, block by block along the axis. Sums in float32, "
        "then a cast. The gradient is that of the product.",
        {"": "x's shape and dtype, contiguous"},
        {"x": _VALUES, "size": "values of a block, a power of two that divides n"},
    ),
    "rotated_fake_quantize_mx": Operator(
        2,
        "`fake_quantize_mx` of `hadamard`, to the bit, both in blocks along the last dimension. The gradient is that "
        "of `hadamard`.",
        {"": "x's shape, contiguous, in `target_dtype`"},
        {
            "x": "(..., n) float32, float16 or bfloat16 of any strides",
            "size": "values that are rotated together, a power of two that divides n; 1 for none",
            "target_dtype": "the dtype of the result; None: that of x. bfloat16 holds every element of at most 8 bits",
            "rounding": NOT_RANDOM,
        },
    ),
    "scaled_mm_mx": Operator(
        1,
        "The product of packed activations and a packed weight, both in blocks of 32 along K, with sums in float32; K "
        f"is a multiple of 32 and N of 16. Elements and results: {_PAIRS}.",
        {"": "(..., N) in `target_dtype`"},
        {
            "x_data": "(..., bytes of K) uint8",
            "x_scale": "`swizzle_scale` of x's scales",
            "weight_data": "(N, bytes of K) uint8",
            "weight_scale": "`swizzle_scale` of the weight's scales",
            "bias": "(N,), or None",
            "x_elem_dtype_name": "the element of x",
            "weight_elem_dtype_name": "the element of the weight",
            "target_dtype": "the dtype of the result",
        },
    ),
    **OF_ACTIVATIONS,
    "swizzle_scale": Operator(
        1,
        "Scales in the order in which tensor cores read them (cuBLAS, 1D Block Scaling Factors Layout): tiles of 128 "
        "rows and 4 columns one after the other, in a tile the 4 columns of rows r, r + 32, r + 64 and r + 96 beside "
        "each other. Missing rows and columns are zeros.",
        {"": "(ceil(R / 128) * 128 * ceil(C / 4) * 4,) uint8"},
        {"scale": "(..., C) uint8, R rows in all"},
    ),
}


def schema_of(name: str) -> torch.FunctionSchema:
    """Return the registered schema of an operator."""
    return getattr(torch.ops.pt2mx, name).default._schema


def meanings(name: str) -> dict[str, str]:
    """Return the arguments of an operator in the order of its schema, and what each means."""
    own = OPERATORS[name].arguments
    return {argument.name: own.get(argument.name) or SHARED[argument.name] for argument in schema_of(name).arguments}
