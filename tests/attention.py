"""Random queries over a packed cache and the result of attention over it; `attention_bfloat16` with defaults."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx import ops
from pt2mx.ops.attention import attention_bfloat16

#: the arguments of `attention_bfloat16` from the element on, where the result is not quantized
NOT_QUANTIZED = (None, 32, "floor", "even")
#: of sums in another order, and of weights in the query's dtype
_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def packed(
    name, dtype, sizes=(2, 8, 2, 1, 77, 64, 64), block=32, mask=None, scale=None, device="cpu", scale_format=None
):
    """The arguments of attention_mx for (batch, heads, heads of the keys, queries, slots, width, width of the values),
    without those of other scales than E8M0, and the result in float32."""
    batch, heads, key_heads, queries, slots, width, value_width = sizes
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, queries, width, generator=generator).to(device, dtype)
    stored: list[Tensor] = []
    cached: list[Tensor] = []
    for n in (width, value_width):
        x = torch.randn(batch, key_heads, slots, n, generator=generator).to(device, dtype)
        modes = ("floor" if scale_format is None else "nearest"), "even", None, scale_format
        code_scale, codes = ops.quantize_mx(x, name, block, -1, *modes)
        stored += [codes, code_scale]
        cached.append(ops.dequantize_mx(codes, code_scale, name, block, dtype, -1, n, scale_format).float())
    mask = None if mask is None else mask.to(device)
    grouped = heads != key_heads
    want = F.scaled_dot_product_attention(query.float(), *cached, mask, scale=scale, enable_gqa=grouped)
    return (query, *stored, name, block, value_width, mask, scale), want


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous()
    finite = want.isfinite()
    assert float((got.float() - want)[finite].norm() / want[finite].norm()) < _TOLERANCE[dtype]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    target_dtype: torch.dtype | None = None,
    elem_dtype_name: str | None = None,
    block_size: int = 32,
    scale_mode: str = "floor",
    rounding: str = "even",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Call `attention_bfloat16`, whose own arguments have no defaults."""
    modes = elem_dtype_name, block_size, scale_mode, rounding, out_dtype
    return attention_bfloat16(query, key, value, mask, is_causal, scale, target_dtype, *modes)
