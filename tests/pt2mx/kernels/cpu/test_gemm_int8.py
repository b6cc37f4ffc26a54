"""GEMMs of integers times powers of two. Where the machine has none of the instructions, a dense matmul is computed."""

import pytest
import torch
from torch.nn import functional as F

from pt2mx import MXSpec, ops
from pt2mx.kernels import reference
from pt2mx.kernels.cpu import linear as cpu_linear
from pt2mx.kernels.cpu import uses
from pt2mx.ops.linear import LinearMX
from tests.compare import relative_error, same
from tests.cpu_kernels import linear, of_capability, random_codes
from tests.threads import on_threads

NAMES = ("int8", "int8_full", "fp4_e2m1", "fp6_e2m3", "int4")


@pytest.fixture(params=["VPMADDUBSW", "VPDPBUSD"])
def dense_calls(request, monkeypatch):
    """Return the list of calls of the dense matmul, and let the kernels use only one instruction for integers."""
    calls, isa_for, integer_isa_for = [], cpu_linear.isa_for, cpu_linear.integer_isa_for
    bit, dense = getattr(cpu_linear, request.param), LinearMX.define
    monkeypatch.setattr(cpu_linear, "integer_isa_for", lambda spec, k: integer_isa_for(spec, k) & bit)
    monkeypatch.setattr(
        cpu_linear, "isa_for", lambda s, k: isa_for(s, k) & cpu_linear.INT8 if integer_isa_for(s, k) & bit else 0
    )
    monkeypatch.setattr(LinearMX, "define", lambda *args: calls.append(1) or dense(*args))
    return calls


def has_int8():
    return cpu_linear.isa_for(MXSpec("int8", 32), 32) & cpu_linear.INT8


def weight(n, k, name, block=32, scales=(120, 134)):
    """Return a weight of random codes and scales: its bytes, scales, spec and values."""
    data, scale, spec = random_codes(n, k, name, block, scales)
    return data, scale, spec, reference.dequantize(data, scale, spec, torch.float32, k)


def quantized(rows, k, name, power=0):
    x = ops.fake_quantize_mx(torch.randn(rows, k) * 2.0**power, name, 32, -1, "floor", "even", None, "identity")
    return x.bfloat16()


def multiplied(x, weight, dtype=torch.float32, bias=None):
    data, scale, spec, values = weight
    got = linear(x, data, scale, bias, spec, dtype=dtype)
    return got, F.linear(x.double(), values.double(), None if bias is None else bias.double())


def test_elements_that_are_integers():
    """Other elements have no codes of 8 bits; blocks are whole groups."""
    for name in NAMES:
        has_amx = bool(cpu_linear.isa_for(MXSpec(name, 64), 64) & cpu_linear.AMX)
        assert not has_int8() or uses.are_integers(64, MXSpec(name, 64)) != has_amx
    for name in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2"):
        assert not uses.are_integers(64, MXSpec(name, 32))
    assert not uses.are_integers(64, MXSpec("int8", 20))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("of_x", ["int8", "fp4_e2m1", "fp6_e2m3"])
def test_a_block_is_exact(dense_calls, name, of_x):
    """Every code of the weight, times values of other elements."""
    x, w = quantized(400, 32, of_x), weight(300, 32, name)
    got, exact = multiplied(x, w)
    assert torch.equal(got.double(), exact)
    assert not dense_calls or not has_int8()


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["int8", "fp4_e2m1", "fp6_e2m3"])
@pytest.mark.parametrize(
    ("rows", "n", "k", "block"),
    [(5, 1, 1, 32), (8, 16, 32, 32), (33, 17, 70, 32), (32, 40, 96, 32), (65, 37, 333, 64), (300, 130, 1100, 32)],
)
def test_sizes_that_are_multiples_of_nothing(dense_calls, name, rows, n, k, block):
    x, w, bias = quantized(rows, k, name), weight(n, k, name, block), torch.randn(n)
    for added in (None, bias):
        got, exact = multiplied(x, w, bias=added)
        plain = F.linear(x.float(), w[-1], added)
        assert got.shape == (rows, n)
        assert relative_error(got, exact) <= max(1.1 * relative_error(plain, exact), 4e-8)
    half, exact = multiplied(x, w, torch.bfloat16, bias.bfloat16())
    assert relative_error(half, exact.bfloat16().double()) < 1e-3
    assert not dense_calls or not has_int8()


def test_a_long_row_is_as_exact(dense_calls):
    x, w = quantized(40, 100_000, "int8"), weight(20, 100_000, "int8")
    got, exact = multiplied(x, w)
    # how exact a float32 matmul is depends on the machine: by a factor of 1.3 at least
    assert relative_error(got, exact) <= 2 * relative_error(F.linear(x.float(), w[-1]), exact)
    assert not dense_calls or not has_int8()


@pytest.mark.parametrize("name", ["int8", "fp4_e2m1"])
@pytest.mark.parametrize(
    ("power", "scale", "supported"),
    [(0, 1, False), (-124, 127, False), (-110, 60, False), (60, 200, False), (-124, 254, False)]
    + [(0, 30, True), (-60, 80, True), (-90, 200, True), (60, 1, True), (110, 20, True), (0, 200, True)],
)
def test_every_scale_counts(dense_calls, name, power, scale, supported):
    """If a product could leave the normal numbers, or a sum could be infinite, a dense matmul is computed."""
    x, w = quantized(40, 32, name, power), weight(40, 32, name, scales=(scale, scale + 1))
    got, exact = multiplied(x, w)
    assert same(got, exact.float() if supported else F.linear(x.float(), w[-1]))
    assert bool(dense_calls) != (supported and bool(has_int8()))


@pytest.mark.parametrize("largest", [100, 127])
def test_the_least_code(dense_calls, largest):
    """-128, alone and next to the largest code."""
    x = torch.randint(-100, largest + 1, (40, 64)).bfloat16()
    x[:, 3], x[:, 40], x[::2, 41] = -128, -128, largest
    got, exact = multiplied(x * 2.0**-9, weight(50, 64, "int8_full", scales=(127, 128)))
    assert torch.equal(got.double(), exact) and (not dense_calls or not has_int8())


def test_zeros(dense_calls):
    """A block of zeros may have any scale: it does not limit the supported scales."""
    x, (data, scale, spec, _) = quantized(40, 128, "int8"), weight(40, 128, "int8")
    x[:, :32], x[7] = 0, -0.0
    data[:, 32:64], scale[:, 1] = 0, 0
    data[5], scale[5, ::2], scale[5, 1::2] = 0, 254, 0
    values = reference.dequantize(data, scale, spec, torch.float32, 128)
    got, exact = multiplied(x, (data, scale, spec, values))
    assert relative_error(got, exact) < 1e-7 and not got[7].any() and not got[:, 5].any()
    assert not dense_calls or not has_int8()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("value", [2.0**-20, 129.0, float("inf"), -float("inf"), float("nan"), 2.0**-133])
def test_values_without_a_code(dense_calls, value, last):
    """Wherever the value is, the whole call is computed by another kernel."""
    x, w = quantized(70, 64, "int8"), weight(40, 64, "int8")
    row = x[-1 if last else 0]
    row[:32], row[17] = 0, value
    if abs(value) < 1e9:
        row[18] = 1
    got, exact = multiplied(x, w)
    plain = F.linear(x.float(), w[-1])
    assert torch.equal(got.isnan(), plain.isnan()) and dense_calls
    finite = exact.isfinite()
    assert torch.equal(got[~finite].nan_to_num(), plain[~finite].nan_to_num())
    assert relative_error(got[finite], exact[finite]) < 1e-6


def test_other_activations_use_another_isa(monkeypatch):
    w = weight(40, 320, "int8")
    isa_for = cpu_linear.isa_for
    for x in (quantized(70, 320, "fp8_e4m3"), torch.randn(70, 320).bfloat16()):
        results = [multiplied(x, w)[0]]
        with monkeypatch.context() as patch:
            patch.setattr(cpu_linear, "isa_for", lambda spec, k: isa_for(spec, k) & ~cpu_linear.INT8)
            results.append(multiplied(x, w)[0])
        assert torch.equal(*results)


def test_a_scale_of_nan(dense_calls):
    x, (data, scale, spec, _) = quantized(40, 64, "int8"), weight(40, 64, "int8")
    scale[3, 1], data[3, 32:], x[5] = 255, 0, 0
    values = reference.dequantize(data, scale, spec, torch.float32, 64)
    got, exact = multiplied(x, (data, scale, spec, values))
    assert got[:, 3].isnan().all() and torch.equal(got.isnan(), exact.isnan())


@pytest.mark.parametrize("rows", [6, 40])
def test_any_number_of_threads(dense_calls, rows):
    x, w = quantized(rows, 1000, "fp6_e2m3"), weight(500, 1000, "fp4_e2m1")
    results = on_threads(lambda: multiplied(x, w)[0], *[1] * 4, *[2] * 4, *[5] * 4)
    same_bits = all(torch.equal(result, results[0]) for result in results[1:])
    assert same_bits or (dense_calls and not has_int8())  # torch's matmul depends on the number of threads


@pytest.mark.parametrize(
    ("isa", "x", "name", "sizes", "faster"),
    [("VPMADDUBSW", "int8", "int8", (512, 256, 256), True), ("VPMADDUBSW", "int8", "int8", (None, 384, 1536), True)]
    + [("VPMADDUBSW", "int8", "int8", sizes, False) for sizes in ((511, 384, 384), (None, 255, 384), (None, 384, 96))]
    + [("VPMADDUBSW", "int8", "int8", (32, 32, 32), True), ("VPDPBUSD", "int8", "int8", (33, 96, 96), True)]
    + [("VPMADDUBSW", "fp4_e2m1", "int8", (33, 96, 96), True), ("VPMADDUBSW", "int8", "fp4_e2m1", (33, 96, 96), True)]
    + [("VPDPBUSD", "int8", "int8", sizes, False) for sizes in ((33, 95, 96), (2048, 96, 64))],
)
def test_sizes_that_are_faster_as_integers(isa, x, name, sizes, faster, monkeypatch):
    monkeypatch.setattr(uses, "integer_isa_for", lambda spec, k: getattr(cpu_linear, isa))
    assert uses.integers_are_faster(MXSpec(x, 32), MXSpec(name, 32), *sizes) == faster


@pytest.mark.slow
def test_avx2(run_python):
    """The kernels for processors without AVX-512."""
    code = "import sys, pytest; assert pytest.main(['-q', '-x', '-m', 'not slow and not compiled', sys.argv[1]]) == 0"
    run_python(code, [__file__], env=of_capability("avx2"))
