"""The matmul of float32 tensors whose values bfloat16 represents, and attention, on each instruction set."""

import pytest
import torch
from torch.nn import functional as F

from pt2mx import FORMATS, MXSpec, ops
from pt2mx.kernels.cpu import bf16_matmul
from pt2mx.kernels.cpu.linear import AMX, AVX512_BF16
from tests.compare import relative_error, same
from tests.kernel_calls import ByArguments
from tests.threads import on_threads

kernels = ByArguments(bf16_matmul)
pytestmark = pytest.mark.skipif(not bf16_matmul.bf16_isa(), reason="no bfloat16 instructions")


@pytest.fixture(params=[AMX, AVX512_BF16], ids=["AMX", "AVX512_BF16"])
def unit(request, monkeypatch):
    if not bf16_matmul.bf16_isa() & request.param:
        pytest.skip("not on this machine")
    monkeypatch.setattr(bf16_matmul, "bf16_isa", lambda: request.param)


#: of results in units of values near 1
TOLERANCES = {torch.float32: {"rtol": 1e-4, "atol": 1e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 2e-3}}


def values(*shape):
    return torch.randn(shape).bfloat16().float()


def no_less_exact(got, plain, exact):
    """A sum of few values has an error of few units in the last place; torch's may be zero by chance."""
    return relative_error(got, exact) <= max(1.15 * relative_error(plain, exact), 6e-8)


@pytest.mark.parametrize("name", FORMATS)
def test_matmuls_are_no_less_exact_than_in_float32(unit, name):
    torch.manual_seed(0)
    for batch, m, k, n in (((), 65, 64, 37), ((3,), 40, 1100, 33), ((2, 3), 130, 33, 100), ((2, 1, 2), 17, 300, 5)):
        x = ops.fake_quantize_mx(torch.randn(*batch, m, k), name, 32, -1, "floor", "even", None, "identity")
        y = ops.fake_quantize_mx(torch.randn(*batch, k, n), name, 32, -2, "floor", "even", None, "identity")
        got = kernels.matmul(x, y)
        assert no_less_exact(got, x @ y, x.double() @ y.double())
        transposed = y.mT.contiguous().mT
        assert torch.equal(kernels.matmul(x, transposed), got)


@pytest.mark.parametrize("shape", [(2, 3, 40, 20), (4, 40, 20)])
def test_strides(unit, shape):
    torch.manual_seed(0)
    x, y = values(*shape), values(*shape[:-2], 20, 50)
    want = kernels.matmul(x, y)
    apart = torch.stack([x, values(*shape)], -1)[..., 0], torch.stack([y, y], -2)[..., 0, :]
    assert torch.equal(kernels.matmul(*apart), want)
    moved = x.transpose(0, 1).contiguous().transpose(0, 1), y.movedim(-2, 0).contiguous().movedim(0, -2)
    assert torch.equal(kernels.matmul(*moved), want)
    same = kernels.matmul(x[:1].expand(shape), y[:1].expand(y.shape))
    assert torch.equal(same[-1], want[0])


def test_bits_do_not_depend_on_threads_or_other_rows(unit):
    torch.manual_seed(0)
    x, y = values(1000, 500), values(500, 300)
    query, key, value = values(2, 2, 300, 64), values(2, 2, 1500, 64), values(2, 2, 1500, 40)
    want = kernels.matmul(x, y), kernels.attention(query, key, value, None, False, None)

    def check_parts():
        assert torch.equal(kernels.matmul(x[100:200], y), want[0][100:200])
        part = kernels.attention(query[:1, :, 40:140], key[:1], value[:1], None, False, None)
        assert torch.equal(part, want[1][:1, :, 40:140])

    on_threads(check_parts, 1, 3, torch.get_num_threads())
    assert all(torch.equal(kernels.matmul(x, y), want[0]) for _ in range(9))


def test_what_is_not_computed(unit):
    """Values that bfloat16 does not represent, results that could be subnormal, few rows."""
    x, y = values(40, 64), values(64, 50)
    assert kernels.matmul(x, y) is not None
    for other in (x + 2.0**-20, x * 2.0**-120, x * 2.0**-130):
        assert kernels.matmul(other, y * 2.0**-10) is None
    assert kernels.matmul(x[:5], y) is None and kernels.matmul(x[:, :0], y[:0]) is None
    inexact = y.clone()
    inexact[63, 49] += 2.0**-20
    assert kernels.matmul(x, inexact) is None
    query, key = values(1, 1, 40, 64), values(1, 1, 40, 64)
    assert kernels.attention(query, key, torch.randn(1, 1, 40, 64), None, False, None) is not None
    subnormal = query * 2.0**-65, key * 2.0**-65
    for others in ((query + 2.0**-20, key), (query, key * 2.0**-130), (query[:, :, :5], key), subnormal):
        assert kernels.attention(*others, key, None, False, None) is None
    wide = values(1, 1, 40, 544)
    assert kernels.attention(wide, wide, wide, None, False, None) is None


def test_what_is_not_finite(unit):
    x, y = values(40, 64), values(64, 50)
    x[3, 5], x[4, 6], y[7, 8] = float("nan"), float("inf"), -float("inf")
    got, want = kernels.matmul(x, y), x @ y
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


SIZES = pytest.mark.parametrize(
    ("heads", "key_heads", "queries", "keys", "width", "value_width"),
    [(3, 3, 20, 20, 32, 32), (4, 2, 33, 50, 40, 24), (2, 1, 100, 70, 64, 64), (1, 1, 70, 2100, 16, 100)],
)


@pytest.mark.parametrize("causal", [False, True])
@SIZES
def test_attention_is_no_less_exact_than_in_float32(unit, heads, key_heads, queries, keys, width, value_width, causal):
    torch.manual_seed(0)
    query = 2 * values(2, queries, heads, width).transpose(1, 2)
    key, value = (values(2, keys, key_heads, n).transpose(1, 2) for n in (width, value_width))
    for scale in (None, 0.5):
        options = {"is_causal": causal, "scale": scale, "enable_gqa": heads != key_heads}
        exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)
        plain = F.scaled_dot_product_attention(query, key, value, **options)
        got = kernels.attention(query, key, value, None, causal, scale)
        assert got.shape == plain.shape and got.transpose(1, 2).is_contiguous()
        # an error of a score is one of all that is summed: where few are, by chance less in torch's
        assert relative_error(got, exact) <= max(1.5 * relative_error(plain, exact), 2e-7)


@pytest.mark.parametrize("causal", [False, True])
@SIZES
def test_attention_in_bfloat16(unit, heads, key_heads, queries, keys, width, value_width, causal):
    torch.manual_seed(0)
    query = 2 * values(2, queries, heads, width).transpose(1, 2)
    key, value = (values(2, keys, key_heads, n).transpose(1, 2) for n in (width, value_width))
    options = {"is_causal": causal, "enable_gqa": heads != key_heads}
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)
    narrow = [tensor.bfloat16() for tensor in (query, key, value)]
    plain = F.scaled_dot_product_attention(*narrow, **options)
    got = kernels.attention(*narrow, None, causal, None, torch.bfloat16)
    assert got.dtype == torch.bfloat16 and got.shape == plain.shape and got.transpose(1, 2).is_contiguous()
    # torch's kernel rounds the weights to bfloat16 too, but for values of another width than the query's
    factor = 1.05 if width == value_width else 1.2
    assert relative_error(got, exact) <= factor * relative_error(plain, exact)
    assert torch.equal(kernels.attention(query, key, value, None, causal, None, torch.bfloat16), got)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_quantized_results_are_those_of_two_steps(unit, name, dtype):
    torch.manual_seed(0)
    for keys, width, mode in ((20, 32, "floor"), (1100, 96, "rceil"), (50, 64, "even")):
        query, key, value = (values(2, 3, n, width).to(dtype) for n in (33, keys, keys))
        value[0, 0, :, :40], value[1, 1, 3, 5], value[1, 2] = 0, float("nan"), value[1, 2] * 2.0**-125
        plain = kernels.attention(query, key, value, None, False, None, dtype)
        spec = MXSpec(name, 32, -1, mode)
        want = ops.fake_quantize_mx(plain.transpose(1, 2), name, 32, -1, mode, "even", None, "identity").transpose(1, 2)
        for out_dtype in (torch.float32, torch.bfloat16):
            got = kernels.attention(query, key, value, None, False, None, dtype, spec, out_dtype)
            assert same(got.contiguous(), want.to(out_dtype).contiguous())
    unsuited = (MXSpec(name, 32, -1, "mse"), 64), (MXSpec(name, 32), 40), (MXSpec(name, 64), 64)
    unsuited = *unsuited, (MXSpec("fp8_e7m0", 32), 64)  # too wide a dynamic range
    for spec, width in unsuited:
        value = values(2, 3, 50, width).to(dtype)
        query, key = values(2, 3, 33, 64).to(dtype), values(2, 3, 50, 64).to(dtype)
        assert kernels.attention(query, key, value, None, False, None, dtype, spec, dtype) is None


@pytest.mark.diagonal
@pytest.mark.parametrize("shape", [(2, 3, 40, 1100), (1, 1, 40, 1100), (2, 1, 1, 1100), (1, 3, 40, 1)])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(unit, shape, added, dtype):
    torch.manual_seed(0)
    query, key, value = 2 * values(2, 3, 40, 32), values(2, 3, 1100, 32), values(2, 3, 1100, 32)
    mask = 3 * torch.randn(shape).to(dtype) if added else torch.rand(shape) < 0.7
    double = mask.double() if added else mask
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), double)
    plain = F.scaled_dot_product_attention(query.to(dtype), key.to(dtype), value.to(dtype), mask)
    got = kernels.attention(query, key, value, mask, False, None, dtype)
    assert got.dtype == dtype
    assert relative_error(got, exact) <= max(1.5 * relative_error(plain, exact), 2e-7)
    strided = torch.stack([mask, mask], -1)[..., 0]
    assert torch.equal(kernels.attention(query, key, value, strided, False, None, dtype), got)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_that_sees_nothing_gives_zeros(unit, added, dtype):
    query, key, value = (values(1, 2, n, 32).to(dtype) for n in (40, 1500, 1500))
    mask = torch.ones(1, 1, 40, 1500, dtype=torch.bool)
    mask[0, 0, 3], mask[0, 0, 4, :1200], mask[0, 0, 5, 900:] = False, False, False
    mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf) if added else mask
    got = kernels.attention(query, key, value, mask, False, None, dtype)
    assert not got[:, :, 3].any() and got.isfinite().all()
    want = F.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), mask if not added else mask.float()
    )
    torch.testing.assert_close(got.float(), want, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_are_no_numbers(unit, dtype):
    query, key, value = (values(1, 2, n, 32).to(dtype) for n in (40, 50, 50))
    query[0, 0, 3, 4], key[0, 1, 5, 6] = float("nan"), float("inf")
    got = kernels.attention(query, key, value, None, False, None, dtype)
    want = F.scaled_dot_product_attention(query.float(), key.float(), value.float())  # in bfloat16 some rows are zeros
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_larger_score_comes_later(unit, dtype):
    """Softmax goes over strips of 1024 keys: a larger score in a later one scales earlier sums down, even to zero."""
    query, value = torch.ones(1, 1, 32, 32), values(1, 1, 3000, 32)
    for size in (0.5, 8.0):
        key = (torch.arange(3000) // 1000 * size).view(1, 1, 3000, 1).expand(1, 1, 3000, 32).bfloat16().float()
        got = kernels.attention(query, key, value, None, False, None, dtype)
        want = F.scaled_dot_product_attention(query, key, value)
        torch.testing.assert_close(got.float(), want, **TOLERANCES[dtype])


@pytest.mark.parametrize("hidden", [-100.0, -103.9, -104.1, -200.0, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_with_tiny_or_no_weight_add_nothing(unit, dtype, hidden):
    """e**-104 is 0 in float32: smaller scores are not computed."""
    torch.manual_seed(0)
    query, key, value = values(1, 2, 40, 64), values(1, 2, 70, 64), values(1, 2, 70, 64)
    mask = torch.full((1, 1, 40, 70), hidden)
    seen = torch.randint(70, (40,))
    mask[0, 0, torch.arange(40), seen] = 0
    query = query * 2.0**-20  # scores are those of the mask
    got = kernels.attention(*(t.to(dtype) for t in (query, key, value)), mask.to(dtype), False, None, dtype)
    assert torch.equal(got, value[:, :, seen].to(dtype))
