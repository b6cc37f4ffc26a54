"""The C++ sums of quantization errors against their definition: counts are equal, powers but for the order of sums."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pt2mx import ELEMENTS, MXError, MXSpec, fake_quantize_mx, parse, tensor_scale_mx
from pt2mx.analysis.sums import quantization_sums
from pt2mx.kernels import reference
from pt2mx.kernels.cpu import quantize
from pt2mx.kernels.float_scales import multiplier_of
from pt2mx.modes import ROUNDINGS
from tests.cpu_kernels import DTYPES, assert_same
from tests.float_scale_operators import NAMES
from tests.threads import on_threads

NARROW = [name for name, element in ELEMENTS.items() if not element.is_wide]
SHAPES = [(70,), (3, 70), (0, 4), (4, 0), (2, 40, 5), (1, 1), (7, 33, 1), (600, 129), (5, 20_000)]


def check(x: torch.Tensor, spec: MXSpec) -> None:
    spec = spec.replace(axis=spec.axis % x.dim())
    t = tensor_scale_mx(x, spec) if spec.scale_format.tensor else None
    stored = reference.scales(x, spec, t)
    assert_same(quantize.scales(x, spec, t), stored, spec)
    if spec.scale_format.is_power_of_two:
        scale = torch.where(stored == 255, math.nan, torch.exp2(stored.double() - 127)).float()
    else:
        scale = multiplier_of(stored, spec, t)
    args = x, fake_quantize_mx(x, spec, tensor_scale=t), scale, spec
    actual, expected = quantize.error_sums(*args), reference.error_sums(*args)
    assert [one.dtype for one in actual] == [one.dtype for one in expected]
    assert actual[:3] == expected[:3], (spec, x.shape)
    assert [float(one) for one in actual] == pytest.approx([float(one) for one in expected], rel=1e-12)


def values(*shape: int) -> torch.Tensor:
    """Some are zero, some saturate, some are flushed; a block has an Inf, another a NaN."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 4, shape).float()) * torch.randint(0, 3, shape)
    if x.numel() > 9:
        x.view(-1)[[0, 9]] = torch.tensor([math.inf, math.nan])
    return x


@pytest.mark.parametrize("name", [*NARROW, "int4", "fp5_e1m3", "fp4_e3m0"])
def test_every_format_and_rounding(name):
    for rounding in (name for name, rounding in ROUNDINGS.items() if not rounding.random):
        check(values(20, 75), MXSpec(name, 32, rounding=rounding))


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_axis_and_dtype(shape, dtype):
    for axis in range(len(shape)):
        for block in (1, 8, 32, 2**40):
            check(values(*shape).to(dtype), MXSpec("fp4_e2m1", block, axis))


@pytest.mark.parametrize("name", [name for name in NAMES if parse(name).block_rows == 1])
def test_scales_with_a_significand(name):
    check(values(40, 96), parse(name))


def test_smallest_and_largest_scales():
    x = torch.tensor([[2.0**-149, 2.0**-127], [3.4e38, -3.0e38], [2.0**-126, 0.0]])
    for name in ("fp4_e2m1", "fp8_e5m2", "int8"):
        check(x, MXSpec(name, 2))


def test_views():
    check(values(70, 64).mT[3:, 1:], MXSpec("fp6_e2m3", 32))


def test_the_sums_do_not_depend_on_the_number_of_threads():
    x = values(300, 1000)
    one, three = on_threads(lambda: quantization_sums(x, MXSpec("fp4_e2m1", 32)), 1, 3)
    assert all(torch.equal(one[name], three[name]) for name in one)


def test_blocks_of_rows_and_random_roundings_have_the_definition():
    x = values(64, 64)
    rows, random = MXSpec("fp8_e4m3", 32, block_rows=32), MXSpec("fp4_e2m1", 32, rounding="stochastic")
    assert quantize.error_sums(x, x, x, rows) is None and quantize.scales(x, random) is None
    torch.manual_seed(0)
    sums = quantization_sums(x, random)
    torch.manual_seed(0)
    error = (x - fake_quantize_mx(x, random))[2:]
    assert quantization_sums(x, rows)["values"] == 4096
    assert sums["noise"].item() >= error.double().square().sum().item()


def test_a_default_device_and_other_dtypes():
    x, spec = values(4, 64), MXSpec("fp4_e2m1", 32)
    with torch.device("meta"):
        sums = quantization_sums(x.cpu(), spec)
    assert sums["signal"].device.type == "cpu" and sums["noise"] == quantization_sums(x, spec)["noise"]
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(MXError, match=f"cannot quantize a tensor of dtype {dtype}"):
            quantization_sums(x.nan_to_num().clamp(-9, 9).to(dtype), spec)


def test_what_traces_operators_gets_the_definition():
    x, spec = torch.randn(4, 64), MXSpec("fp4_e2m1", 32)

    def noise(x):
        return quantization_sums(x, spec)["noise"]

    graph = make_fx(noise)(x[0])
    assert [graph(row).item() for row in x] == pytest.approx([noise(row).item() for row in x])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(noise(x[0]), FakeTensor)


@pytest.mark.slow
def test_other_processors(on_other_processors):
    on_other_processors(__file__, "every_format")
