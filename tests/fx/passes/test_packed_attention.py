import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2mx import ops
from pt2mx.fx.passes.packed_operands import use_packed_attention
from pt2mx.ops.attention import attention_mx
from tests.flow import exported
from tests.graph import calls

aten = torch.ops.aten


class Cached(nn.Module):
    """Writes one token to a cache of codes, and reads all."""

    def __init__(self, late=False, block=32, value_block=32, axis=-1, **options):
        super().__init__()
        self.late, self.block, self.value_block, self.axis, self.options = late, block, value_block, axis, options

    def forward(self, query, key, value, mask, slot, codes, scales, value_codes, value_scales):
        scale, data = ops.quantize_mx(key, "fp8_e4m3", self.block, -1, "floor", "even")
        value_scale, value_data = ops.quantize_mx(value, "fp8_e4m3", self.value_block, -1, "floor", "even")
        if not self.late:
            codes.index_copy_(2, slot, data)
            scales.index_copy_(2, slot, scale)
        value_codes.index_copy_(2, slot, value_data)
        value_scales.index_copy_(2, slot, value_scale)
        keys = ops.dequantize_mx(codes, scales, "fp8_e4m3", self.block, query.dtype, -1)
        values = ops.dequantize_mx(value_codes, value_scales, "fp8_e4m3", self.value_block, query.dtype, -1)
        if self.late:
            codes.index_copy_(2, slot, data)
            scales.index_copy_(2, slot, scale)
        return F.scaled_dot_product_attention(query, keys, values, mask, **self.options)


def inputs(mask=True, dtype=torch.float32, value_block=32):
    torch.manual_seed(0)
    held = torch.randn(2, 2, 10, 64)
    scale, codes = ops.quantize_mx(held, "fp8_e4m3", 32, -1, "floor", "even")
    value_scale, value_codes = ops.quantize_mx(held, "fp8_e4m3", value_block, -1, "floor", "even")
    seen = torch.rand(2, 1, 1, 10) > 0.5 if mask is True else mask
    token = [torch.randn(2, 2, 1, 64, dtype=dtype) for _ in range(2)]
    cache = codes, scale, value_codes, value_scale
    return torch.randn(2, 4, 1, 64, dtype=dtype), *token, seen, torch.tensor([3]), *cache


def cloned(args):
    return [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [True, None])
def test_attention_over_a_cache_of_codes(dtype, mask):
    args = inputs(mask, dtype)
    model = exported(Cached(enable_gqa=True), *cloned(args))
    want = model(*cloned(args))
    use_packed_attention(model)
    (call,) = calls(model, attention_mx)
    assert not calls(model, aten.scaled_dot_product_attention.default, ops.dequantize_mx)
    assert call.meta["val"].shape == (2, 4, 1, 64)
    torch.testing.assert_close(model(*cloned(args)), want, atol=1e-6 if dtype == torch.float32 else 1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Cached(late=True, enable_gqa=True), {}),  # the codes have changed by then
        (Cached(value_block=16, enable_gqa=True), {"value_block": 16}),
        (Cached(enable_gqa=True), {"mask": torch.zeros(2, 1, 1, 10)}),
        (Cached(enable_gqa=True, is_causal=True), {"mask": None}),
    ],
)
def test_what_stays(module, options):
    args = inputs(**options)
    model = exported(module, *cloned(args))
    want = model(*cloned(args))
    use_packed_attention(model)
    assert not calls(model, attention_mx)
    assert torch.equal(model(*cloned(args)), want)


class Written(Cached):
    """Writes to the keys after they are dequantized."""

    def forward(self, query, key, value, mask, slot, codes, scales, value_codes, value_scales):
        keys = ops.dequantize_mx(codes, scales, "fp8_e4m3", 32, query.dtype, -1)
        values = ops.dequantize_mx(value_codes, value_scales, "fp8_e4m3", 32, query.dtype, -1)
        keys[:, :, 0] = 1
        return F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)


def test_keys_that_are_written_stay():
    args = inputs()
    model = exported(Written(), *cloned(args))
    want = model(*cloned(args))
    use_packed_attention(model)
    assert not calls(model, attention_mx) and torch.equal(model(*cloned(args)), want)


@pytest.mark.parametrize("heads", [{"query": (2, 1), "keys": (2, 2)}, {"query": (2, 2), "keys": (1, 2)}])
def test_what_is_broadcast_stays(heads):
    class Broadcast(nn.Module):
        def forward(self, query, codes, scales):
            keys = ops.dequantize_mx(codes, scales, "fp8_e4m3", 32, query.dtype, -1)
            return F.scaled_dot_product_attention(query, keys, keys)

    torch.manual_seed(0)
    scale, codes = ops.quantize_mx(torch.randn(*heads["keys"], 10, 64), "fp8_e4m3", 32, -1, "floor", "even")
    model = exported(Broadcast(), torch.randn(*heads["query"], 1, 64), codes, scale)
    use_packed_attention(model)
    assert not calls(model, attention_mx)


def test_values_with_blocks_along_the_slots_stay():
    class Across(nn.Module):
        def forward(self, query, codes, scales, value_codes, value_scales):
            keys = ops.dequantize_mx(codes, scales, "fp8_e4m3", 32, query.dtype, -1)
            values = ops.dequantize_mx(value_codes, value_scales, "fp8_e4m3", 32, query.dtype, 2)
            return F.scaled_dot_product_attention(query, keys, values)

    torch.manual_seed(0)
    held = torch.randn(2, 2, 64, 64)
    (scale, codes), (value_scale, value_codes) = (
        ops.quantize_mx(held, "fp8_e4m3", 32, axis, "floor", "even") for axis in (-1, 2)
    )
    args = torch.randn(2, 2, 1, 64), codes, scale, value_codes, value_scale
    model = exported(Across(), *args)
    want = model(*args)
    use_packed_attention(model)
    assert not calls(model, attention_mx) and torch.equal(model(*args), want)
