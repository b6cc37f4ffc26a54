"""linear_mx of many rows in bfloat16 on each instruction set, with results in fp32 and in 16 bits."""

import ctypes

import pytest
import torch
from torch.nn import functional as F

from pt2mx import ELEMENTS, FORMATS, MXSpec, ops
from pt2mx.kernels import reference
from pt2mx.kernels.cpu import linear as cpu_linear
from pt2mx.kernels.cpu.build import load
from pt2mx.kernels.cpu.calls import LinearCall
from pt2mx.kernels.cpu.quantize import TABLE, table_of
from pt2mx.kernels.packing import packed_length
from pt2mx.ops.linear import LinearMX
from tests.compare import relative_error
from tests.cpu_kernels import linear
from tests.threads import on_threads


@pytest.fixture(params=["first", "without AMX", "AVX512_BF16"])
def isa(request, monkeypatch):
    """Let the kernels use the first instruction set of this machine; those without AMX, which is INT8 for some
    elements; AVX512_BF16 alone. Where the machine has none, a dense matmul is computed."""
    isa_for = cpu_linear.isa_for
    allowed = {"first": -1, "without AMX": ~cpu_linear.AMX, "AVX512_BF16": cpu_linear.AVX512_BF16}[request.param]
    monkeypatch.setattr(cpu_linear, "isa_for", lambda spec, k: isa_for(spec, k) & allowed)


def operands(rows, n, k, name, block=32):
    """Return quantized x in bfloat16, a packed weight, and the weight's values."""
    x = ops.fake_quantize_mx(torch.randn(rows, k), name, block, -1, "floor", "even", None, "identity").bfloat16()
    scale, data = ops.quantize_mx(torch.randn(n, k), name, block, -1, "floor", "even")
    spec = MXSpec(name, block, 1)
    return x, data, scale, spec, reference.dequantize(data, scale, spec, torch.float32, k)


@pytest.mark.diagonal
@pytest.mark.parametrize(("rows", "n", "k", "block"), [(65, 37, 64, 32), (300, 130, 1100, 64), (97, 33, 333, 32)])
@pytest.mark.parametrize("name", FORMATS)
def test_no_less_exact_than_a_float_matmul(isa, name, rows, n, k, block):
    x, data, scale, spec, weight = operands(rows, n, k, name, block)
    bias = torch.randn(n)
    exact = F.linear(x.double(), weight.double(), bias.double())
    got = linear(x, data, scale, bias, spec, dtype=torch.float32)
    assert got.dtype == torch.float32
    # a sum of few values has an error of few units in the last place; torch's may be zero by chance
    assert relative_error(got, exact) <= max(1.1 * relative_error(F.linear(x.float(), weight, bias), exact), 4e-8)
    half = linear(x, data, scale, bias.bfloat16(), spec)
    rounded = F.linear(x.double(), weight.double(), bias.bfloat16().double()).bfloat16()
    assert half.dtype == torch.bfloat16 and relative_error(half, rounded.double()) < 1e-3
    fp16 = linear(x, data, scale, None, spec, dtype=torch.float16)
    wide = linear(x, data, scale, None, spec, dtype=torch.float32).half()
    if cpu_linear.isa_for(spec, k):
        assert torch.equal(fp16, wide)
    else:  # the last bits of a dense matmul depend on the addresses of its operands
        assert relative_error(fp16, wide.double()) < 1e-3


@pytest.mark.parametrize("name", ["int8", "fp4_e2m1"])
def test_a_row_does_not_depend_on_the_others(isa, name):
    """Nor on how rows and columns are distributed to threads."""
    x, data, scale, spec, _ = operands(400, 300, 1600, name)
    want = linear(x, data, scale, None, spec, dtype=torch.float32)
    for again in on_threads(lambda: linear(x[100:300], data, scale, None, spec, dtype=torch.float32), 1, 3):
        assert torch.equal(again, want[100:300])


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_the_same_bits_in_ten_runs(isa, name):
    x, data, scale, spec, _ = operands(200, 96, 512, name)
    want = linear(x, data, scale, None, spec, dtype=torch.float32)
    assert all(torch.equal(linear(x, data, scale, None, spec, dtype=torch.float32), want) for _ in range(9))


@pytest.mark.parametrize("tiny", ["x", "weight"])
def test_tiny_values_count(isa, tiny):
    """Matrix instructions take subnormal numbers for zero."""
    x, data, scale, spec, weight = operands(70, 40, 64, "int8")
    if tiny == "x":
        x = (x.float() * 2.0**-120).bfloat16()
    else:
        scale = torch.zeros_like(scale)  # 2**-127
        weight = reference.dequantize(data, scale, spec, torch.float32, 64)
    got = linear(x, data, scale, None, spec, dtype=torch.float32)
    exact = F.linear(x.double(), weight.double())
    assert exact.any() and relative_error(got, exact) < 1e-6


@pytest.mark.parametrize(("power", "dense"), [(-80, 0), (-126, 1)])
def test_small_values_are_multiplied_as_long_as_products_are_normal(isa, power, dense, monkeypatch):
    """Activations have such values: GELU of -10 is below 2**-73. Otherwise a dense matmul is computed."""
    calls = []
    plain = LinearMX.define
    monkeypatch.setattr(LinearMX, "define", lambda *args: calls.append(1) or plain(*args))
    x, data, scale, spec, weight = operands(70, 40, 64, "int8")
    x[5, 7] = 2.0**power
    got = linear(x, data, scale, None, spec, dtype=torch.float32)
    isa_bits = cpu_linear.AMX | cpu_linear.AVX512_BF16  # that value is no integer times a block's power of two
    assert len(calls) == (dense if cpu_linear.isa_for(spec, 64) & isa_bits else 1)
    exact = F.linear(x.double(), weight.double())
    assert relative_error(got, exact) < 1e-6


def test_what_is_not_finite():
    x, data, scale, spec, weight = operands(70, 40, 64, "fp8_e5m2")
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    scale[7, 0] = 255
    weight = reference.dequantize(data, scale, spec, torch.float32, 64)
    got = linear(x, data, scale, None, spec, dtype=torch.float32)
    want = F.linear(x.float(), weight)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert got[3].isnan().all() and got[:, 7].isnan().all() and not got[5, :7].isnan().any()


def test_strides_and_dimensions(isa):
    x, data, scale, spec, _ = operands(300, 40, 64, "fp6_e3m2")
    want = linear(x, data, scale, None, spec, dtype=torch.float32)
    folded = x.view(3, 100, 64).transpose(0, 1)
    got = linear(folded, data, scale, None, spec, dtype=torch.float32)
    assert torch.equal(got, want.view(3, 100, 40).transpose(0, 1))


@pytest.mark.parametrize(
    "name", [name for name, element in FORMATS.items() if element.bits == 4] + ["int4", "fp6_e2m3"]
)
@pytest.mark.parametrize("block", [32, 64])
def test_every_code_with_every_scale(isa, name, block):
    """Rows of the identity give the decoded weight, to the bit, of scales that all values are normal with."""
    k, n = 320, 77  # the last groups are part of a chunk of eight
    size = packed_length(k, ELEMENTS[name].bits)
    data = torch.randint(0, 256, (n, size)).to(torch.uint8)
    scale = torch.randint(60, 200, (n, k // block)).to(torch.uint8)
    spec = MXSpec(name, block, 1)
    weight = reference.dequantize(data, scale, spec, torch.float32, k)
    for tiny in (0, 1):  # a scale with subnormal values in one group
        scale[5, -1], scale[70, 1] = (0, 1) if tiny else (100, 150)
        weight = reference.dequantize(data, scale, spec, torch.float32, k)
        got = linear(torch.eye(k).bfloat16(), data, scale, None, spec, dtype=torch.float32)
        assert torch.equal(got, weight.T)


@pytest.mark.diagonal
@pytest.mark.parametrize("k", [2080, 4128, 5000])
def test_long_rows_are_summed_exactly(isa, k):
    """Sums of small integers are exact in any order, so parts of K give the bits of the definition."""
    x, values = torch.randint(-2, 3, (100, k)).bfloat16(), torch.randint(-2, 3, (300, k)).float()
    for name in ("fp4_e2m1", "int8"):
        scale, data = ops.quantize_mx(values, name, 32, -1, "floor", "even")
        got = linear(x, data, scale, None, MXSpec(name, 32, 1), dtype=torch.float32)
        assert torch.equal(got, F.linear(x.double(), values.double()).float())


def task(rows: int, n: int, k: int, threads: int, amx: bool) -> tuple[int, int]:
    """Return the rows and the columns of a task."""
    call = LinearCall(m=rows, n=n, k=k, isa=cpu_linear.AMX if amx else cpu_linear.AVX512_BF16)
    load()[0].pt2mx_set_tasks(ctypes.addressof(call), 1, threads)
    return call.task_rows, call.task_columns


@pytest.mark.parametrize("amx", [False, True])
def test_tasks_cover_the_result(amx):
    for rows, n, k in ((65, 32, 64), (2048, 1536, 384), (100_000, 33, 4096), (70, 128_256, 2048)):
        down, across = task(rows, n, k, 2, amx)
        assert down % 32 == across % 32 == 0 and 32 <= across <= 1024 and 32 <= down <= rows + 31


def test_amx_keeps_few_sums_of_a_part_of_k():
    for rows, n in ((512, 2048), (4096, 2048), (100_000, 64)):
        down, across = task(rows, n, 8192, 2, True)
        assert down <= 1024 and across <= 256
        assert across == min(n, task(rows, n, 2048, 2, True)[1])


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_compute_the_same_number_of_columns(threads):
    for n, k in ((512, 4608), (384, 1536), (1536, 384), (2048, 2048)):
        _, across = task(n, n, k, threads, False)
        panels, tasks = n // 32, -(-n // across)
        assert -(-tasks // threads) * across // 32 == -(-panels // threads)


def test_codes_that_are_looked_up_have_no_instructions():
    """Callers other than Python, as programs in C++, ask the library."""
    assert load()[0].pt2mx_isa(TABLE, ctypes.addressof(table_of("fp5_e2m2"))) == 0
