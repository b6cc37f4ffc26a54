"""A few rows of integers times powers of two, against sums that are exact within a group, to the bit."""

import ctypes
import platform
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx import MXSpec, ops
from pt2mx.kernels import reference
from pt2mx.kernels.cpu import linear as cpu_linear
from pt2mx.kernels.packing import pack
from tests.compare import relative_error
from tests.cpu_kernels import DTYPES, linear, of_capability, random_codes
from tests.threads import on_threads

NAMES = ("fp4_e2m1", "fp4_e3m0", "int4", "int4_full", "fp6_e2m3", "int8", "int8_full")
AMX = cpu_linear.TDPBSSD | cpu_linear.VPDPBUSD  # with the instruction for fewer rows
VBMI = cpu_linear.VPERMB | cpu_linear.VPDPBUSD
#: the most rows of x that each instruction multiplies in the order of `expected`
MOST_ROWS = {cpu_linear.VPMADDUBSW: 32, cpu_linear.VPDPBUSD: 32, AMX: 32, VBMI: 32, cpu_linear.SDOT: 4}


def quantized(rows: int, k: int, name: str = "int8") -> Tensor:
    return ops.fake_quantize_mx(torch.randn(rows, k), name, 32, -1, "floor", "even", None, "identity")


def expected(x: Tensor, data: Tensor, scale: Tensor, spec: MXSpec, bias: Tensor | None = None) -> Tensor:
    """Return x times the weight in float32: exact sums of adjacent values, in the order of the number of rows."""
    values = reference.dequantize(data, scale, spec, torch.float32, x.shape[-1])
    add, values_of_sum = (_by_lanes, 8 if spec.element.bits == 4 else 4) if len(x) <= 4 else (_by_strips, 32)
    pad = -x.shape[-1] % (16 * values_of_sum)
    left, right = (F.pad(t.double(), (0, pad)).unflatten(-1, (-1, values_of_sum)) for t in (x, values))
    total = add(torch.einsum("mgk,ngk->gmn", left, right).float())
    return total if bias is None else total + bias


def _by_lanes(sums: Tensor) -> Tensor:
    """Add every sixteenth sum to a lane, and halves of the lanes."""
    lanes = torch.zeros(16, *sums.shape[1:])
    for span in sums.unflatten(0, (-1, 16)):
        lanes = lanes + span
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def _by_strips(groups: Tensor) -> Tensor:
    """Add groups one by one to a sum of eight groups, and these sums to the result."""
    total = torch.zeros(groups.shape[1:])
    for strip in groups.split(8):
        partial = torch.zeros_like(total)
        for group in strip:
            partial = partial + group
        total = total + partial
    return total


@pytest.fixture
def with_isa(monkeypatch):
    """Return a function that computes `linear` with the bits of one of MOST_ROWS, or with 0: by other kernels."""

    def compute(bit: int, *args: object, **rest: object) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(cpu_linear, "integer_isa_for", lambda spec, k: bit)
            return linear(*args, **rest)

    return compute


def available(name: str, rows: int = 1) -> list[int]:
    """Return those of MOST_ROWS that this processor has for a number of rows of x, which may be none."""
    bits = cpu_linear.integer_isa_for(MXSpec(name, 32), 64)
    return [isa for isa, most in MOST_ROWS.items() if bits & isa == isa and rows <= most]


def has_dotprod() -> bool:
    """Return whether Linux says that this is an AArch64 processor with FEAT_DotProd."""
    capabilities = 16  # AT_HWCAP
    return platform.machine() == "aarch64" and bool(ctypes.CDLL(None).getauxval(capabilities) & 1 << 20)


def test_elements_that_are_integers():
    for name in ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2"):
        assert cpu_linear.integer_isa_for(MXSpec(name, 32), 64) == 0
    assert cpu_linear.integer_isa_for(MXSpec("int8", 20), 64) == 0
    assert cpu_linear.integer_isa_for(MXSpec("int8", 32, scale_format="float32"), 64) == 0
    vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert all((cpu_linear.VPMADDUBSW in available(name)) == vectors for name in ("fp4_e2m1", "int4", "int8"))
    assert all((cpu_linear.SDOT in available(name)) == has_dotprod() for name in NAMES)


@pytest.mark.diagonal
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("of_x", ["int8", "fp4_e2m1", "fp6_e2m3"])
def test_same_bits_as_exact_sums(name, of_x, with_isa):
    """Rows that end within a strip and within a group, rows of the weight that fill no vector, every number of rows of
    x, and every dtype."""
    for i, (n, k, block) in enumerate([(1, 1, 32), (16, 256, 32), (37, 576, 32), (70, 1000, 32), (33, 2049, 64)]):
        w, x, bias = random_codes(n, k, name, block), quantized(32, k, of_x), torch.randn(n)
        for j, rows in enumerate((1, 2, 3, 4, 7, 8, 16, 19, 32)):
            for bit in available(name, rows):
                dtype, added = DTYPES[(i + j) % 3], bias if j % 2 else None
                y = with_isa(bit, x[:rows].to(dtype), *w[:2], added, w[2], torch.float32)
                assert torch.equal(y, expected(x[:rows], *w, added)), (n, k, bit, rows)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("of_x", ["int8", "fp4_e2m1", "fp6_e2m3"])
def test_more_rows_have_the_same_bits(name, of_x, monkeypatch):
    """The kernels for many rows add in the same order."""
    isa_for = cpu_linear.isa_for
    monkeypatch.setattr(cpu_linear, "isa_for", lambda spec, k: isa_for(spec, k) & cpu_linear.INT8)
    x, w, bits = quantized(40, 1000, of_x), random_codes(37, 1000, name), available(name, 5)
    for bit in bits:
        monkeypatch.setattr(cpu_linear, "integer_isa_for", lambda spec, k, bit=bit: bit)
        assert torch.equal(linear(x.bfloat16(), *w[:2], None, w[2], torch.float32), expected(x, *w))
        assert torch.equal(linear(x[:5], *w[:2], None, w[2]), expected(x[:5], *w))


def test_largest_codes(with_isa):
    """All products have the largest magnitude, of either sign, so that sums of 16 bits would overflow first."""
    for name, largest, least in (("fp4_e2m1", 7, 15), ("int4", 7, 8), ("fp6_e2m3", 31, 63), ("int8_full", 127, 128)):
        codes = torch.tensor([[largest], [least], [0]], dtype=torch.uint8).expand(3, 320).contiguous()
        spec = MXSpec(name, 32, 1)
        data = pack(codes, 1, spec.element.bits) if spec.element.bits < 8 else codes
        scale = torch.full((3, 10), 127, dtype=torch.uint8)
        for value in (127 / 64, -127 / 64, -2.0):
            x = torch.full((9, 320), value)
            for rows in (4, 9):
                for bit in available(name, rows):
                    y = with_isa(bit, x[:rows], data, scale, None, spec)
                    assert torch.equal(y, expected(x[:rows], data, scale, spec))


@pytest.mark.parametrize("rows", [4, 9])
def test_zeros_may_have_any_scale(rows, with_isa):
    x, (data, scale, spec) = quantized(rows, 640), random_codes(40, 640, "fp4_e2m1")
    x[:, :32], x[2] = 0, -0.0
    data[:, 16:32], scale[:, 1] = 0, 0
    data[5], scale[5, ::2], scale[5, 1::2] = 0x88, 254, 0
    for bit in available("fp4_e2m1", rows):
        y = with_isa(bit, x, data, scale, None, spec)
        assert torch.equal(y, expected(x, data, scale, spec)) and not y[2].any() and not y[:, 5].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_partial_group_of_zeros_may_have_any_scale(name, with_isa):
    """Its codes are padded with zeros, not with those of an earlier group."""
    x, (data, scale, spec) = quantized(4, 264), random_codes(40, 264, name)
    data[::3, 32 * spec.element.bits :], scale[::3, 8] = 0, 0
    for bit in available(name):
        assert torch.equal(with_isa(bit, x, data, scale, None, spec), expected(x, data, scale, spec))


@pytest.mark.parametrize("rows", [3, 9])
@pytest.mark.parametrize("byte", [0, 1, 250, 254, 255])
def test_extreme_scales(byte, rows, with_isa):
    """Another kernel computes what could be subnormal or infinite, and a NaN."""
    x, (data, scale, spec) = quantized(rows, 640), random_codes(40, 640, "int8")
    scale[7, 13], data[7, 13 * 32] = byte, 1
    for power in (0, -100, 60):
        args = (x * 2.0**power, data, scale)
        for bit in available("int8", rows):
            y = with_isa(bit, *args, None, spec)
            is_supported = (byte, power) in {(0, 60), (1, 60), (250, -100)}
            other = expected(*args, spec) if is_supported else with_isa(0, *args, None, spec)
            assert torch.equal(y.view(torch.int32), other.view(torch.int32)), (byte, power)


@pytest.mark.diagonal
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("name", NAMES)
def test_reads_nothing_past_a_tensor(name, rows, with_isa, before_guard_page):
    """Rows of the weight are read up to the end of a vector, and so into the next rows, but not past the last row."""
    for n, k in ((1, 1), (2, 31), (3, 33), (4, 65), (5, 127), (17, 129), (6, 256)):
        for block in (32, 96):
            x, (data, scale, spec), bias = quantized(rows, k), random_codes(n, k, name, block), torch.randn(n)
            guarded = [before_guard_page(t) for t in (x, data, scale, bias)]
            for bit in available(name, rows):
                assert torch.equal(with_isa(bit, *guarded, spec), expected(x, data, scale, spec, bias)), (n, k, bit)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [32, 64])
def test_scales_of_the_rows_after_change_nothing(name, block, with_isa):
    """A NaN in a row of the weight makes that result NaN and no other, however short the rows are."""
    for k in (20, 33, 100, 130):
        x, (data, scale, spec) = quantized(4, k), random_codes(140, k, name, block)
        scale[1::2, 0] = 255
        for bit in available(name):
            y = with_isa(bit, x, data, scale, None, spec)
            assert y[:, 1::2].isnan().all()
            assert relative_error(y[:, ::2], expected(x, data[::2], scale[::2], spec)) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_zeros_with_any_scale_in_larger_blocks(name, with_isa):
    """Scales of every third block are out of range, as are those of blocks of zeros."""
    x, (data, scale, spec) = quantized(3, 500), random_codes(70, 500, name, 64)
    for block in range(0, 8, 3):
        width = 8 * spec.element.bits
        data[::2, block * width : (block + 1) * width], scale[::2, block] = 0, 254 * (block % 2)
    for bit in available(name):
        assert torch.equal(with_isa(bit, x, data, scale, None, spec), expected(x, data, scale, spec))


@pytest.mark.parametrize("value", [2.0**-20, 129 / 64, torch.inf, -torch.inf, torch.nan, 2.0**-133])
def test_values_without_a_code_use_another_kernel(value, with_isa):
    w = random_codes(40, 640, "fp4_e2m1")
    for rows in (1, 5, 9):
        x = quantized(rows, 640)
        x[-1, 32:64], x[-1, 40] = 1, value
        for bit in available("fp4_e2m1"):
            got, other = (with_isa(b, x, *w[:2], None, w[2]) for b in (bit, 0))
            assert torch.equal(got.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e2m3", "int8"])
def test_same_bits_in_every_run_with_any_threads(name, with_isa):
    w = random_codes(515, 1100, name)
    for rows in (1, 5, 16):
        want = expected(x := quantized(rows, 1100), *w)
        for bit in available(name, rows):
            call = partial(with_isa, bit, x, *w[:2], None, w[2])
            assert all(torch.equal(y, want) for y in on_threads(call, *[1, 2, 3] * 3, 1))


@pytest.mark.slow
def test_avx2(run_python):
    """The kernels for processors without AVX-512."""
    code = """
import sys
import pytest
import torch
assert pytest.main(["-q", "-x", sys.argv[1]]) == 0
print(torch.backends.cpu.get_cpu_capability())
"""
    printed = run_python(code, [__file__], env=of_capability("avx2"))
    assert printed.strip().splitlines()[-1] in ("AVX2", "DEFAULT", "NO AVX")
