"""The operators of a decoder's step on the CPU, where they are what their definitions say."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

from pt2mx import FORMATS, MXError, MXSpec, dequantize_mx, quantize_mx
from pt2mx.kernels.decoder_linear import interleave, parts
from pt2mx.kernels.gpu.mma_layout import to_mma_layout
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.decoding import decoding_attention, decoding_attention_mx, normed_linear_mx, residual_linear_mx, stored
from tests.attention import packed
from tests.operators import opchecks
from tests.threads import on_threads

N, K = 48, 72


def operands(name, n=N, k=K):
    """x, a weight in the MMA layout, and its values."""
    scale, data = quantize_mx(torch.randn(n, k), name)
    values = dequantize_mx(data, scale, name, 32, torch.bfloat16, length=k).float()
    return torch.randn(2, 3, k).bfloat16(), to_mma_layout(data, scale, MXSpec(name)), values


def test_interleave():
    rows = torch.arange(32).unsqueeze(1)
    of_tiles = [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]
    assert interleave(rows).flatten().tolist() == [row for tile in of_tiles for row in tile]
    gate, values = parts(interleave(rows).t())
    assert gate.flatten().tolist() == list(range(16)) and values.flatten().tolist() == list(range(16, 32))


@pytest.mark.diagonal
@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(("name", "checks"), opchecks(FORMATS))
def test_a_norm_and_a_gate(name, checks, gate):
    x, weight, values = operands(name)
    bias = torch.randn(N).bfloat16()
    squares = F.pad(x.float().square(), (0, 8)).unflatten(-1, (-1, 16)).sum(-1)
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5) @ values.t() + bias
    if gate is not None:
        first, second = parts(y)
        y = (F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")) * second
    args = x, *weight, bias, name, N, squares, 1e-5, gate
    got = normed_linear_mx(*args)
    assert got.shape == y.shape and got.dtype == torch.bfloat16
    assert (got.float() - y).norm() <= 2**-8 * y.norm()
    opcheck(normed_linear_mx, args, test_utils=checks)


def test_no_norm():
    x, weight, values = operands("fp4_e2m1")
    got = normed_linear_mx(x, *weight, None, "fp4_e2m1", N, None, 0.0, None)
    torch.testing.assert_close(got, (x.float() @ values.t()).bfloat16())


@pytest.mark.parametrize(("name", "checks"), opchecks(FORMATS))
def test_a_residual_sum(name, checks):
    x, weight, values = operands(name, n=40)
    residual, norm_weight = torch.randn(2, 3, 40).bfloat16(), torch.randn(40).bfloat16()
    args = x, *weight, None, name, 40, residual, norm_weight
    total, weighted, squares = residual_linear_mx(*args)
    torch.testing.assert_close(total, residual + (x.float() @ values.t()).bfloat16())
    assert torch.equal(weighted, total * norm_weight)
    torch.testing.assert_close(squares[..., :2], total.float().square()[..., :32].unflatten(-1, (2, 16)).sum(-1))
    torch.testing.assert_close(squares[..., 2], total.float().square()[..., 32:].sum(-1))
    opcheck(residual_linear_mx, args, test_utils=checks)


def test_both_are_an_rms_norm():
    x, first, _ = operands("fp8_e4m3", n=K)
    _, second, values = operands("fp8_e4m3")
    norm_weight = torch.rand(K).bfloat16() + 0.5
    total, weighted, squares = residual_linear_mx(x, *first, None, "fp8_e4m3", K, x, norm_weight)
    got = normed_linear_mx(weighted, *second, None, "fp8_e4m3", N, squares, 1e-6, None)
    want = F.rms_norm(total.float(), (K,), norm_weight.float(), 1e-6) @ values.t()
    assert (got.float() - want).norm() <= 2**-8 * want.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": "relu"}, "no gate 'relu': allowed are silu, gelu_tanh, or None"),
        ({"n": 40, "gate": "silu"}, "the weight of a gate has 40 rows: a multiple of 16 is allowed"),
        ({"squares": torch.ones(2, 3, 4)}, r"squares must be \(2, 3, 5\) torch.float32 on cpu, not \(2, 3, 4\)"),
        ({"x": torch.ones(2, K)}, "take bfloat16 x"),
        ({"bias": torch.ones(1).bfloat16()}, r"bias of shape \(1,\), .* does not fit a weight of 48 rows"),
        ({"bias": torch.ones(N)}, r"bias .* torch.float32 .* does not fit .* a result in torch.bfloat16"),
        ({"squares": torch.ones(2, 3, 5, device="meta")}, "squares must be .* on cpu, not .* on meta"),
    ],
)
def test_bad_input(change, message):
    x, weight, _ = operands("fp4_e2m1", n=change.get("n", N))
    given = {"x": x, "bias": None, "n": N, "squares": None, "gate": None, **change}
    rest = given["bias"], "fp4_e2m1", given["n"], given["squares"], 0.0, given["gate"]
    with pytest.raises(MXError, match=message):
        normed_linear_mx(given["x"], *weight, *rest)


@pytest.mark.parametrize("bad", ["residual", "norm_weight"])
def test_bad_residual(bad):
    x, weight, _ = operands("fp4_e2m1")
    given = {"residual": torch.ones(2, 3, N).bfloat16(), "norm_weight": torch.ones(N).bfloat16()}
    given[bad] = given[bad].float()
    with pytest.raises(MXError, match=rf"{bad} must be .* torch.bfloat16 on cpu, not .* torch.float32 on cpu"):
        residual_linear_mx(x, *weight, None, "fp4_e2m1", N, *given.values())


def cache_of(heads=4, key_heads=2, slots=12):
    query = torch.randn(2, heads, 1, 16).bfloat16()
    return query, *(torch.randn(2, key_heads, slots, 16).bfloat16() for _ in range(2))


@pytest.mark.parametrize("masked", [False, True])
def test_attention(masked):
    operands = cache_of()
    mask = torch.rand(2, 1, 1, 12) < 0.6 if masked else None
    want = F.scaled_dot_product_attention(*(one.float() for one in operands), mask, scale=0.3, enable_gqa=True)
    args = *operands, mask, 0.3, torch.zeros(4, dtype=torch.int32)
    got = decoding_attention(*args)
    assert got.dtype == torch.bfloat16 and (got.float() - want).norm() <= 2**-7 * want.norm()
    opcheck(decoding_attention, args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "3 heads of queries: allowed is a multiple of the 2 of the keys"),
        (
            {"dtype": torch.float32},
            "are torch.float32, torch.bfloat16, torch.bfloat16: all must be float32, float16 or",
        ),
        ({"mask": torch.ones(2, 1, 1, 11, dtype=torch.bool)}, r"broadcast to \(2, 4, 1, 12\), not \(2, 1, 1, 11\)"),
        ({"mask": torch.ones(2, 1, 1, 12)}, "the mask must be booleans .* torch.float32"),
        ({"zeros": torch.zeros(4)}, r"zeros must be \(n,\) torch.int32 and contiguous, not \(4,\) torch.float32"),
        ({"zeros": torch.zeros(8, dtype=torch.int32)[::2]}, r"contiguous, not \(4,\) torch.int32 of strides \(2,\)"),
        ({"zeros": torch.zeros(4, dtype=torch.int32, device="meta")}, "must be on one device, not on cpu and meta"),
        ({"slots": 11}, r"keys \(2, 2, 12, 16\) and values \(2, 2, 11, 16\) must be"),
    ],
)
def test_bad_attention(change, message):
    query, keys, values = cache_of(change.get("heads", 4))
    query, values = query.to(change.get("dtype", torch.bfloat16)), values[:, :, : change.get("slots", 12)]
    with pytest.raises(MXError, match=message):
        decoding_attention(query, keys, values, change.get("mask"), None, change.get("zeros"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "value_width"), [(9, 3, 64, 64), (4, 4, 32, 96), (32, 1, 128, 32)]
)
def test_attention_on_the_cpu(dtype, heads, key_heads, width, value_width):
    """Sums are in float32, and hidden keys and values may be no numbers."""
    query, keys = torch.randn(2, heads, 1, width).to(dtype), torch.randn(2, key_heads, 37, width).to(dtype)
    values, mask = torch.randn(2, key_heads, 37, value_width).to(dtype), torch.rand(2, 1, 1, 37) < 0.7
    mask[:, :, :, :4], mask[1, :, :, 20:] = True, False
    as_floats = query.float(), keys.float(), values.float(), mask
    want = F.scaled_dot_product_attention(*as_floats, scale=0.3, enable_gqa=heads != key_heads)
    hidden = ~mask[:, :, 0, :, None].expand_as(keys[:, :1])
    keys, values = keys.masked_fill(hidden, torch.nan), values.masked_fill(hidden[..., :1], torch.inf)
    got = decoding_attention(query, keys, values, mask, 0.3, None)
    error = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-8}[dtype]
    assert got.dtype == dtype and (got.float() - want).norm() <= error * want.norm()
    of_heads = mask.expand(-1, heads, -1, -1)
    (again,) = on_threads(lambda: decoding_attention(query, keys, values, of_heads, 0.3, None), 3)
    assert torch.equal(again, got)
    assert not decoding_attention(query, keys, values, torch.zeros_like(mask), 0.3, None).any()


def test_strides_of_attention_on_the_cpu():
    """The mask of one query may have any stride of its slots."""
    query, keys, values = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 9, 64)[..., :32], torch.randn(1, 9, 2, 32)
    values, rows = values.transpose(1, 2), torch.rand(1, 1, 1, 18) < 0.6
    for mask in (rows[..., ::2], rows[..., :9], rows[..., :1].expand(1, 1, 1, 9), rows[..., 3:4]):
        got = decoding_attention(query, keys, values, mask, None, None)
        want = decoding_attention(query, keys.contiguous(), values.contiguous(), mask.clone().contiguous(), None, None)
        assert torch.equal(got, want)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(query, keys, values, mask))


@pytest.mark.diagonal
@pytest.mark.parametrize(("name", "block", "scale_format"), [("fp6_e2m3", 32, None), ("fp4_e2m1", 16, "e4m3")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_over_codes(dtype, name, block, scale_format):
    mask = torch.rand(2, 1, 1, 77) < 0.6
    args, _ = packed(name, dtype, block=block, mask=mask, scale=0.3, scale_format=scale_format)
    zeros = torch.zeros(4, dtype=torch.int32)
    got = decoding_attention_mx(*args, zeros, scale_format)
    assert torch.equal(got, attention_mx(*args, scale_format)) and not zeros.any()
    opcheck(decoding_attention_mx, (*args, zeros, scale_format))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.ones(2, 3, 1, 64).bfloat16()}, "a query of 2 sequences and 3 heads does not fit"),
        ({10: torch.zeros(4)}, r"zeros must be \(n,\) torch.int32 and contiguous, not \(4,\) torch.float32"),
        ({10: torch.zeros(4, dtype=torch.int32, device="meta")}, "must be on one device, not on cpu and meta"),
        ({11: "e4m3_f32"}, "has a tensor scale: pass tensor_scale"),
    ],
)
def test_bad_attention_over_codes(change, message):
    args = [*packed("fp4_e2m1", torch.bfloat16)[0], None, None]
    for index, value in change.items():
        args[index] = value
    with pytest.raises(MXError, match=message):
        decoding_attention_mx(*args)


def test_stored():
    x = torch.randn(3, 4)
    assert torch.equal(stored(x), x)
    opcheck(stored, (x,))
    compiled = torch.compile(lambda x: (stored(x.cos()) + 1, stored(x.cos()) * 2), fullgraph=True)
    torch.testing.assert_close(compiled(x), (x.cos() + 1, x.cos() * 2))
