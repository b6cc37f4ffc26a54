"""Inductor's lowerings of the operators that its graphs still call. Importing this module registers them:
`pt2mx.register` does, once Inductor's own have been imported."""

import torch
from torch._inductor import lowering

from pt2mx.ops import inductor as _inductor  # noqa: F401 - defines `dense`
from pt2mx.ops.activation_decompositions import ACTIVATION_DECOMPOSITIONS
from pt2mx.ops.bfloat16_products import attention_bfloat16
from pt2mx.ops.linear import linear_mx
from pt2mx.ops.quantized_convolution import conv2d_fake_quantize_mx
from pt2mx.ops.quantized_linear import linear_fake_quantize_mx

lowering.register_lowering(torch.ops.pt2mx.dense, type_promotion_kind=None)(lambda x: x)
_OF_ANY_STRIDES = attention_bfloat16, linear_fake_quantize_mx, conv2d_fake_quantize_mx, *ACTIVATION_DECOMPOSITIONS
for _operator in _OF_ANY_STRIDES:
    lowering.make_fallback(_operator, warn=False, override_decomp=True)
lowering.make_fallback(linear_mx, lowering.constrain_to_fx_strides, warn=False, override_decomp=True)
