"""Inductor's lowerings of the operators that its graphs still call. Importing this module registers them:
`pt2mx.process` does, once Inductor's own have been imported."""

import torch
from torch._inductor import lowering

from pt2mx.ops import inductor as _inductor  # noqa: F401 - defines `dense`
from pt2mx.ops.fp8_rows import layer_norm_fp8_rows, mm_fp8_rows, quantize_fp8_rows
from pt2mx.ops.linear import linear_mx
from pt2mx.ops.quantized_activations import activation_fake_quantize_mx, layer_norm_fake_quantize_mx

#: operators that stay calls where their decomposition declines, and take tensors of any strides
_CALLS = (
    activation_fake_quantize_mx,
    layer_norm_fake_quantize_mx,
    quantize_fp8_rows,
    layer_norm_fp8_rows,
    mm_fp8_rows,
)

lowering.register_lowering(torch.ops.pt2mx.dense, type_promotion_kind=None)(lambda x: x)
for _operator in _CALLS:
    lowering.make_fallback(_operator, warn=False, override_decomp=True)
lowering.make_fallback(linear_mx, lowering.constrain_to_fx_strides, warn=False, override_decomp=True)
