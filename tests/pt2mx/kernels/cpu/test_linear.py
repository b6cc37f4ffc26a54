"""The C++ kernels of linear_mx and grouped_linear_mx against float64 matmuls of the dequantized operands."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx import FORMATS, MXSpec, ops
from pt2mx.kernels import reference
from pt2mx.kernels.cpu import linear as cpu_linear
from pt2mx.kernels.packing import packed_length
from tests.compare import relative_error
from tests.cpu_kernels import DTYPES, linear, of_capability, packed
from tests.kernel_calls import ByArguments
from tests.oracle import NARROW
from tests.threads import on_threads


def check(x: Tensor, data: Tensor, scale: Tensor, spec: MXSpec, bias: Tensor | None = None) -> None:
    """Check that the error is at most 1.5 times the error of torch's matmul in x's dtype."""
    weight = reference.dequantize(data, scale, spec, torch.float32, x.shape[-1])
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    y = linear(x, data, scale, bias, spec)
    assert y.shape == exact.shape and y.dtype == x.dtype
    plain = relative_error(F.linear(x, weight.to(x.dtype), bias), exact)
    # a sum of few values has an error of few units in the last place; torch's may be zero by chance
    assert relative_error(y, exact) <= max(1.5 * plain, 4e-7), (spec, x.shape, x.dtype)


@pytest.fixture
def without_tiles(monkeypatch):
    isa_for = cpu_linear.isa_for
    monkeypatch.setattr(cpu_linear, "isa_for", lambda spec, k: isa_for(spec, k) & ~cpu_linear.AMX)


@pytest.mark.parametrize("name", NARROW)
def test_every_element(name):
    """Blocks of whole groups, and others; rows of x for each kernel; sizes that are multiples of nothing."""
    for i, block in enumerate((16, 32, 64, 7, 2**40)):
        data, scale, spec = packed(37, (160, 96, 250, 133, 71)[i], name, block)
        for j, rows in enumerate((1, 3, 6, 40)):
            dtype = DTYPES[(i + j) % 3] if name not in FORMATS else torch.bfloat16
            k = (160, 96, 250, 133, 71)[i]
            check(torch.randn(rows, k).to(dtype), data, scale, spec, torch.randn(37).to(dtype) if j % 2 else None)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_long_rows(name, dtype):
    data, scale, spec = packed(70, 9001, name, 32)
    for rows in (1, 2, 5, 33, 65):
        check(torch.randn(rows, 9001).to(dtype), data, scale, spec, torch.randn(70).to(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_more_rows_than_a_panel(name):
    data, scale, spec = packed(300, 64, name, 32)
    check(torch.randn(2, 300, 64).bfloat16(), data, scale, spec)


@pytest.mark.parametrize("power", [0, -39, -45, -120, 39, 100])
def test_all_bits_of_float32_count(power):
    """The identity gives back values of 24 bits, with AMX as sums of three bfloat16 values. Where the product of the
    last one could be subnormal, fp32 vectors multiply."""
    x = torch.randn(20, 96).clamp(min=2.0**-6) * 2.0**power
    for name in ("fp4_e2m1", "fp8_e4m3", "int8"):
        scale, data = ops.quantize_mx(torch.eye(96), name, 32, -1, "floor", "even")
        for rows in (5, 11, 20):
            assert torch.equal(linear(x[:rows], data, scale, None, MXSpec(name, 32, 1)), x[:rows])
            doubled = linear(x[:rows], data, scale + 1, None, MXSpec(name, 32, 1))
            assert torch.equal(doubled, 2 * x[:rows])


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2"])
def test_float32_that_bfloat16_represents(name):
    """The same bits as x in bfloat16, and as next to a row for which all values become sums of three."""
    data, scale, spec = packed(70, 300, name, 32)
    x = ops.fake_quantize_mx(torch.randn(32, 300), "fp8_e4m3", 32, -1, "floor", "even", None, "identity")
    for rows in (12, 16, 17, 32):
        y = linear(x[:rows], data, scale, None, spec)
        assert torch.equal(y, linear(x[:rows].bfloat16(), data, scale, None, spec, torch.float32))
        other = torch.cat([x[: rows - 1], torch.full((1, 300), 1 + 2.0**-20)])
        assert torch.equal(linear(other, data, scale, None, spec)[:-1], y[:-1])


@pytest.mark.parametrize("name", FORMATS)
def test_exact_sums(name):
    """Sums of small integers times one scale are exact in any order, so each kernel gives the bits of the definition:
    rows that end within a vector, and the weight's last row, past which no kernel reads."""
    for n, k in ((1, 31), (5, 64), (9, 128), (37, 1000), (70, 2049)):
        x, values = torch.randint(-2, 3, (32, k)).float(), torch.randint(-1, 2, (n, k)).float()
        scale, data = ops.quantize_mx(values * 2.0**5, name, 32, -1, "floor", "even")
        for rows in (1, 2, 4, 7, 16, 32):
            expected = F.linear(x[:rows].double(), values.double() * 2.0**5)
            for dtype in DTYPES:
                y = linear(x[:rows].to(dtype), data, scale, None, MXSpec(name, 32, 1))
                assert torch.equal(y, expected.to(dtype)), (n, k, rows, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp4_e2m1", "int4"])
def test_rows_of_x_have_the_same_bits_alone(name, dtype, without_tiles):
    """Codes of 4 bits, and rows of the weight that fill no tile, and spans that are partial."""
    for n, k in ((70, 2049), (37, 96), (64, 256)):
        data, scale, spec = packed(n, k, name, 32)
        x = torch.randn(32, k).to(dtype)
        together = {rows: linear(x[:rows], data, scale, None, spec) for rows in (2, 3, 4, 7, 16, 32)}
        assert all(torch.equal(y, together[32][:rows]) for rows, y in together.items())
        if dtype == torch.float32:  # one row in bfloat16 may run on AVX512_BF16
            alone = torch.cat([linear(row, data, scale, None, spec) for row in x.split(1)])
            assert torch.equal(alone, together[32])


@pytest.mark.diagonal
@pytest.mark.parametrize("rows", [1, 3, 5, 20])
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_with_every_scale(name, rows):
    """A row of the identity gives a column of the dequantized weight, to the bit: NaN, Inf, subnormal values."""
    size = packed_length(32, FORMATS[name].bits)
    data = torch.randint(0, 256, (256 * 8, size)).to(torch.uint8)
    data[:256] = torch.arange(256, dtype=torch.uint8)[:, None]
    scale = torch.arange(256).repeat(8)[:, None].to(torch.uint8)
    spec = MXSpec(name, 32, 1)
    weight = reference.dequantize(data, scale, spec, torch.float32, 32)
    finite = weight.isfinite().all(1)
    for first in range(0, 32, rows):
        x = torch.eye(32)[first : first + rows]
        y = linear(x, data, scale, None, spec).T
        assert torch.equal(y[finite], weight[finite, first : first + rows])
        assert not y[~finite].isfinite().all()
        half = linear(x.bfloat16(), data, scale, None, spec).T
        assert torch.equal(half[finite], weight[finite, first : first + rows].bfloat16())
        assert torch.equal(half.isfinite(), y.isfinite() & y.bfloat16().isfinite())


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e3m2", "fp6_e2m3", "int4", "fp6_e4m1"])
def test_extreme_scales_and_values(name, rows, without_tiles):
    """Values for which the sum of a block without its scale would overflow or be subnormal."""
    data, scale, spec = packed(24, 200, name, 32)
    x = torch.randn(rows, 200).bfloat16()
    scale[:4, :3] = torch.tensor([[0, 120, 127], [0, 0, 0], [62, 63, 1], [191, 192, 130]], dtype=torch.uint8)
    for row in range(24):  # each by itself: the error of a sum is measured against all rows
        check(x, data[row : row + 1], scale[row : row + 1], spec)
    check(x * 2.0**100, data, scale.clamp(max=126), spec)
    data[5], scale[5] = data[5] | 0x77, 10
    large = torch.full((rows, 200), 1e38).bfloat16()  # its sum of unscaled products is infinite, its result is not
    assert linear(large, data[5:6], scale[5:6], None, spec).isfinite().all()
    data, scale = ops.quantize_mx(torch.full((1, 200), 2.0**60), name, 32, -1, "floor", "even")[::-1]
    for tiny in (2.0**-126, 2.0**-130, 2.0**-99):  # products that are subnormal without their scale
        check(torch.randint(0, 2, (rows, 200)).bfloat16() * tiny, data, scale, MXSpec(name, 32, 1))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 6])
def test_nan_scale_spoils_its_row_only(name, rows):
    data, scale, spec = packed(9, 100, name, 32)
    scale[4, 3] = 255
    for dtype in DTYPES:
        y = linear(torch.randn(rows, 100).to(dtype), data, scale, None, spec)
        assert y[:, 4].isnan().all()
        assert y.isnan().sum() == rows


def test_nan_code_of_e4m3():
    data, scale, spec = packed(9, 100, "fp8_e4m3", 32)
    data[2, 99], data[7, 5] = 0x7F, 0xFF
    for dtype in DTYPES:
        for rows in (1, 6):
            y = linear(torch.randn(rows, 100).to(dtype), data, scale, None, spec)
            assert y.isnan().all(0).tolist() == [False, False, True, False, False, False, False, True, False]


def test_bits_after_the_last_code_do_not_count():
    x = torch.rand(1, 5)
    for name in ("fp4_e2m1", "fp6_e3m2"):
        scale, data = ops.quantize_mx(torch.rand(4, 5), name, 32, -1, "floor", "even")
        spec = MXSpec(name, 32, 1)
        scale.fill_(254)  # the values overflow to +Inf, and later values would be NaN, because Inf times zero is NaN
        expected = linear(x, data, scale, None, spec)
        assert (expected == torch.inf).all()
        data[:, -1] |= 0xF0
        assert torch.equal(linear(x, data, scale, None, spec), expected)


@pytest.mark.compiled
def test_subnormals_count_where_they_are_flushed(run_python):
    code = """
import torch
from pt2mx import ops
data, scale = torch.full((3, 32), 64, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8)  # 2**-127 each
assert torch.set_flush_denormal(True)
for rows in (1, 3, 8):
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((rows, 32), 2.0**122, dtype=dtype)
        print(torch.ops.pt2mx.linear_mx(x, data, scale, None, "int8", 32, 0).eq(1.0).all().item())
"""
    assert set(run_python(code).split()) == {"True"}


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp8_e4m3", "fp6_e2m3", "int8", "int5"])
def test_same_bits_in_every_run_with_any_threads(name):
    data, scale, spec = packed(515, 300, name, 32)
    for rows in (1, 3, 20, 100):
        x = torch.randn(rows, 300).bfloat16()
        results = on_threads(lambda x=x: linear(x, data, scale, None, spec), *[1, 2] * 5)
        assert all(torch.equal(results[0], y) for y in results)


@pytest.mark.parametrize("name", FORMATS)
def test_without_matrix_registers(name, without_tiles):
    data, scale, spec = packed(37, 133, name, 32)
    for rows in (6, 31, 40):
        check(torch.randn(rows, 133).bfloat16(), data, scale, spec)


def test_strided_operands():
    data, scale, spec = packed(40, 64, "fp4_e2m1", 32)
    x, bias = torch.randn(7, 3, 128)[..., ::2], torch.randn(80)[::2]
    check(x, data, scale, spec, bias)
    check(torch.randn(64, 9).T, data[::2], scale[::2], spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["fp4_e2m1", "fp8_e5m2", "int3"])
def test_grouped(name, dtype):
    """Experts without rows, with one, and with many; rows after the last."""
    x = torch.randn(60, 70).to(dtype)
    scale, data = ops.quantize_mx(torch.randn(5, 37, 70), name, 32, -1, "floor", "even")
    spec = MXSpec(name, 32, 2)
    y = ByArguments(cpu_linear).grouped_linear(x, data, scale, torch.tensor([0, 1, 8, 8, 57], dtype=torch.int32), spec)
    assert y.shape == (60, 37) and y.dtype == dtype
    for expert, (first, last) in enumerate([(0, 0), (0, 1), (1, 8), (8, 8), (8, 57)]):
        expected = linear(x[first:last], data[expert], scale[expert], None, MXSpec(name, 32, 1))
        assert torch.equal(y[first:last], expected)
    assert not y[57:].any()


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp8_e4m3", "int8"])
def test_grouped_rows_that_bfloat16_holds(name, monkeypatch):
    """Such rows are multiplied as bfloat16, with results in float32; other values, and few rows, as float32."""
    dtypes, kernel = [], cpu_linear.linear
    monkeypatch.setattr(cpu_linear, "linear", lambda call, *args: dtypes.append(call.x.dtype) or kernel(call, *args))
    scale, data = ops.quantize_mx(torch.randn(3, 96, 128), name, 32, -1, "floor", "even")
    weight, ends = (
        ops.dequantize_mx(data, scale, name, 32, torch.float32, -1).double(),
        torch.tensor([50, 50, 120]).int(),
    )
    spec, values = (
        MXSpec(name, 32, 2),
        ops.fake_quantize_mx(torch.randn(120, 128), name, 32, -1, "floor", "even", None, "identity"),
    )
    has_isa = bool(cpu_linear.isa_for(MXSpec(name, 32, 1), 128))
    for x, narrow in ((values, has_isa), (values * (1 + 2.0**-20), False), (values[:30], False)):
        dtypes.clear()
        got = ByArguments(cpu_linear).grouped_linear(x, data, scale, ends.clamp(max=len(x)), spec)
        exact = torch.cat([x[:50].double() @ weight[0].T, x[50:].double() @ weight[2].T])
        assert set(dtypes) == {torch.bfloat16 if narrow else torch.float32} and got.dtype == torch.float32
        assert relative_error(got, exact) < 5e-7


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_other_processors(run_python, capability):
    """The kernels for processors with fewer vector instructions."""
    code = """
import sys
import pytest, torch
from pt2mx import MXSpec
from pt2mx.kernels.cpu import linear
assert pytest.main(["-q", "-x", sys.argv[1], "-k", sys.argv[2]]) == 0
print(torch.backends.cpu.get_cpu_capability(), bool(linear.isa_for(MXSpec("int8", 32), 32)), sep=", ")
"""
    names = ("every_element", "exact_sums", "(long_rows and float32)", "(every_code and 3)", "nan_scale", "nan_code")
    tests = " or ".join((*names, "last_code"))
    printed = run_python(code, [__file__, tests], env=of_capability(capability))
    name, units = printed.strip().lower().splitlines()[-1].split(", ")
    assert name in (capability, "default", "no avx")
    assert units == str(name == "avx2").lower()  # AVX2 multiplies integers
