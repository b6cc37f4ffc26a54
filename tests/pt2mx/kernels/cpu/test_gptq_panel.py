"""The C++ panel of GPTQ against its definition, to the bit."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pt2mx import ELEMENTS, SCALE_FORMATS, MXSpec
from pt2mx.kernels import gptq_panel
from pt2mx.kernels.cpu import gptq_panel as cpu
from pt2mx.kernels.select import run_step
from pt2mx.modes import ROUNDINGS
from tests.cpu_kernels import assert_same

NARROW = [name for name, element in ELEMENTS.items() if not element.is_wide]
SHAPES = [(1, 128, 64), (1, 128, 200), (3, 7, 65), (2, 1, 1), (5, 64, 15), (0, 4, 8), (2, 4, 0)]


def panel(groups: int, width: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Columns, a factor and scales; some values are zero, others saturate."""
    columns = torch.randn(groups, width, n) * torch.randint(0, 3, (groups, width, n))
    factor = (torch.randn(groups, width, width) / 8 + torch.eye(width)).triu()
    return columns, factor, torch.exp2(torch.randint(-4, 2, (groups, width, n)).float())


def check(
    columns: torch.Tensor, factor: torch.Tensor, scale: torch.Tensor, spec: MXSpec, *bounds: torch.Tensor
) -> None:
    args = columns, factor, scale, spec, *bounds
    for actual, expected in zip(cpu.round_panel(*args), gptq_panel.round_panel(*args), strict=True):
        assert_same(actual, expected, (spec, columns.shape))


@pytest.mark.compiled_cases("fp5_e2*", "fp5_e3*", "fp7_*", "int5*", "int7*")
@pytest.mark.parametrize("name", [*NARROW, "int4", "fp5_e1m3", "fp4_e3m0"])
def test_every_format_and_rounding(name):
    for rounding in (name for name, rounding in ROUNDINGS.items() if not rounding.random):
        check(*panel(2, 70, 75), MXSpec(name, 32, rounding=rounding))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape(shape):
    check(*panel(*shape), MXSpec("mxfp4", 32))


def test_scales_with_a_significand():
    columns, factor, scale = panel(2, 40, 33)
    spec = MXSpec("mxfp4", 16, scale_mode="nearest", scale_format=SCALE_FORMATS["e4m3"])
    check(columns, factor, scale * (1 + torch.rand(scale.shape)), spec)


def test_bounds():
    columns, factor, scale = panel(2, 40, 33)
    low = columns - torch.rand(columns.shape)
    check(columns, factor, scale, MXSpec("mxint8", 32), low, low + torch.rand(columns.shape))


def test_views():
    columns, factor, scale = panel(2, 80, 33)
    middle = slice(10, 60)
    bounds = scale[:, middle] - 3, scale[:, middle]
    check(columns[:, middle], factor[:, middle, middle], scale.mT.contiguous().mT[:, middle], MXSpec("mxfp4"), *bounds)


def test_values_that_are_not_finite():
    columns, factor, scale = panel(1, 20, 40)
    columns[0, 3, 5], columns[0, 4, 6], columns[0, 5, 7] = torch.inf, -torch.inf, torch.nan
    check(columns, factor, scale, MXSpec("mxfp4", 32))


def test_it_changes_no_argument():
    tensors = panel(1, 20, 40)
    copies = [tensor.clone() for tensor in tensors]
    for round_panel in (cpu.round_panel, gptq_panel.round_panel):
        round_panel(*tensors, MXSpec("mxfp4", 32))
        assert all(map(torch.equal, tensors, copies))


def test_fake_tensors_get_the_definition():
    tensors = panel(1, 20, 40)
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = run_step("gptq_panel", *tensors, MXSpec("mxfp4", 32))
    assert [(type(one), one.shape) for one in results] == [(FakeTensor, (1, 20, 40))] * 2


@pytest.mark.slow
def test_other_processors(on_other_processors):
    on_other_processors(__file__, "every_format")
