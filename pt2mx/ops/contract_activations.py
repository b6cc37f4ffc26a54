"""The part of the contract for activations: quantized where they are computed, and multiplied with each other."""

from __future__ import annotations

from pt2mx.kernels.fp8_rowwise import ACTIVATIONS, ROOMS
from pt2mx.ops.contract_entry import NOT_RANDOM, Operator, choices

_LAST = "(..., K) float32, float16 or bfloat16 of any strides"
_ROOM = ", ".join(f"2**-{room.spread} of it for `{name}`" for name, room in ROOMS.items())
_ROWS = {
    "data": "(..., K) uint8, codes of `fp8_e4m3`",
    "scale": "(..., 1) float32, a power of two, or -1 of a row that does not fit",
    "rest": "(..., K) in x's dtype: the values of the rows that do not fit; the others mean nothing",
}

OF_ACTIVATIONS = {
    "quantize_fp8_rows": Operator(
        2,
        "`quantize_mx` of an activation of x, in blocks of 32 along the last dimension, as FP8 rows: E4M3 codes of the "
        "same values with one scale a row. A row does not fit that is not finite, or where the scale of a block that "
        f"is not zero is too far below the largest ({_ROOM}).",
        _ROWS,
        {
            "x": "(..., K) float32, float16 or bfloat16 of any strides, K a multiple of 32",
            "elem_dtype_name": f"one of {choices(ROOMS)}",
            "rounding": NOT_RANDOM,
            "activation": f"what is computed of x first, and rounded to its dtype: {choices(ACTIVATIONS)}",
        },
    ),
    "layer_norm_fp8_rows": Operator(
        2,
        "`quantize_fp8_rows` of the layer norm of x + residual along the last dimension, both rounded to x's dtype.",
        {"normed": "x's shape and dtype: the norm before it is quantized", **_ROWS},
        {
            "x": "(..., K) float32, float16 or bfloat16 of any strides, K a multiple of 32",
            "residual": "x's shape and dtype, or None",
            **dict.fromkeys(("weight", "bias"), "(K,) in x's dtype or float32, or None"),
            "eps": "what is added to the variance",
            "elem_dtype_name": f"one of {choices(ROOMS)}",
            "rounding": NOT_RANDOM,
        },
    ),
    "mm_fp8_rows": Operator(
        1,
        "The product of FP8 rows and a weight of FP8 rows that all fit; rows that do not fit count as what they have "
        "in `rest`. On a GPU sums are those of its tensor cores for FP8, with partial sums in float32.",
        {"": "(..., N) in the dtype of `rest`"},
        {
            "data": "(..., K) uint8, K a multiple of 16",
            "scale": "(..., 1) float32",
            "rest": "(..., K) float32, float16 or bfloat16",
            "weight_data": "(N, K) uint8, N a multiple of 16",
            "weight_scale": "(N, 1) float32",
            "bias": "(N,) in the dtype of `rest`, or None",
        },
    ),
    "activation_fake_quantize_mx": Operator(
        1,
        "`fake_quantize_mx` of an activation of x along the last dimension, to the bit. The activation is rounded to "
        "x's dtype; its last bits are the device's own. The gradient is that of the activation.",
        {"": "x's shape, in `target_dtype`"},
        {
            "x": _LAST,
            "activation": f"what is computed of x: {choices(ACTIVATIONS)}",
            "rounding": NOT_RANDOM,
            "target_dtype": "float32, float16 or bfloat16; None is that of x",
        },
    ),
    "layer_norm_fake_quantize_mx": Operator(
        1,
        "The layer norm of x + residual along the last dimension, and `fake_quantize_mx` of it, to the bit. Sum and "
        "norm are rounded to the dtype of the sum; the last bits of the norm are the device's own.",
        {
            "normed": "x's shape, in the dtype of the sum: the norm before it is quantized",
            "quantized": "x's shape, in `target_dtype`",
        },
        {
            "x": _LAST,
            "residual": "x's shape, float32, float16 or bfloat16, or None",
            **dict.fromkeys(("weight", "bias"), "(K,) in the dtype of the sum or float32, or None"),
            "eps": "what is added to the variance",
            "rounding": NOT_RANDOM,
            "target_dtype": "float32, float16 or bfloat16; None is that of the sum",
        },
    ),
    "matmul_bfloat16": Operator(
        1,
        "`matmul` in float32 of values that bfloat16 holds, as quantized ones, on units for bfloat16: products are "
        "exact, sums are in float32, in any order. Other values are rounded to bfloat16 on a GPU; elsewhere, and with "
        "a result in another dtype, it is torch's product. x and y have gradients; autocast casts them to its dtype.",
        {"": "(*batch, M, N) in `target_dtype`, contiguous"},
        {
            "x": "(*batch, M, K) float32, float16 or bfloat16 of any strides",
            "y": "(*batch, K, N) in x's dtype, of any strides",
            "target_dtype": "the dtype of the result; None: that of x",
        },
    ),
    "attention_bfloat16": Operator(
        1,
        "`scaled_dot_product_attention` of values that bfloat16 holds, as quantized ones, on units for bfloat16: "
        "scores are sums in float32 of exact products; weights and their product with `value` are no less exact than "
        "in float32, and with a result in bfloat16 weights are rounded to it, as torch's are. Other values are rounded "
        "on a GPU and with a result in bfloat16; elsewhere, and with one in float16, it is torch's attention. A query "
        "that sees no key gives zeros. With an element the result is quantized in blocks along W, as by "
        "`fake_quantize_mx`; its gradient is the identity.",
        {"": "(B, heads, S, W) in `out_dtype`, in memory as (B, S, heads, W)"},
        {
            "query": "(B, heads, S, D) float32, float16 or bfloat16 of any strides",
            "key": "(B, heads of the keys, L, D) in the query's dtype; each head has the queries of as many heads as "
            "there are more of them",
            "value": "(B, heads of the keys, L, W) in the query's dtype",
            "mask": "broadcasts to (B, heads, S, L): booleans, false where a key is hidden from a query, or values in "
            "the dtype of the result that are added to the scores; or None",
            "is_causal": "key j is hidden from the queries before j; without a mask",
            "scale": "of the scores; None: D ** -0.5",
            "target_dtype": "the dtype of the product; None: that of the query",
            "elem_dtype_name": "the element of the result; None: it is not quantized",
            "rounding": NOT_RANDOM,
            "out_dtype": "the dtype of a quantized result; None: that of the product",
        },
    ),
    "linear_fake_quantize_mx": Operator(
        1,
        "`activation_fake_quantize_mx` of `linear_mx`, to the bit. The gradient is that of both; autocast casts x and "
        "bias to its dtype, to which the product is rounded then.",
        {"": "(..., N) in `target_dtype`"},
        {
            "x": "(..., K) float32, float16 or bfloat16",
            "bias": "(N,) in the dtype of the product, or None",
            "elem_dtype_name": "the element of the weight, as of `linear_mx`",
            "block_size": "that of the weight",
            "product_dtype": "the dtype to which the product is rounded; None is that of x",
            "activation": f"what is computed of the product: {choices(ACTIVATIONS)}",
            "out_elem_dtype_name": "the element of the result",
            "out_block_size": "that of the result",
            "rounding": NOT_RANDOM,
            "target_dtype": "float32, float16 or bfloat16; None is that of the product",
        },
    ),
    "conv2d_fake_quantize_mx": Operator(
        1,
        "`activation_fake_quantize_mx` of `conv2d_mx` + residual, to the bit, and the activation. Product, sum and "
        "activation are rounded to their dtype. The gradient is that of all of these; autocast casts x and bias to its "
        "dtype, to which the product is rounded then.",
        {
            "activated": "(B, H', W', N) in the dtype of the sum: the activation before it is quantized, whose last "
            "bits are the device's own; no values where it is not kept",
            "quantized": "(B, H', W', N) in `target_dtype`",
        },
        {
            "x": "(B, H, W, C) float32, float16 or bfloat16 of any strides",
            "weight_data": "(N, height and width of the kernel, bytes of C) uint8, packed along C, which is the axis",
            "weight_scale": "(N, height and width of the kernel, ceil(C / block_size)) uint8, E8M0",
            "bias": "(N,) in the dtype of the product, or None",
            "elem_dtype_name": "the element of the weight, as of `conv2d_mx`",
            "block_size": "that of the weight",
            **dict.fromkeys(("stride", "dilation"), "of height and width, at least 1"),
            "padding": "of height and width, zeros on both sides",
            "product_dtype": "the dtype to which the product is rounded; None is that of x",
            "residual": "(B, H', W', N) float32, float16 or bfloat16, added to the product, or None",
            "activation": f"what is computed of the sum: {choices(ACTIVATIONS)}",
            "keep_activated": "true: the activation is a result too",
            "out_elem_dtype_name": "the element of the result",
            "out_block_size": "that of the result",
            "rounding": NOT_RANDOM,
            "target_dtype": "float32, float16 or bfloat16; None is that of the sum",
        },
    ),
}
