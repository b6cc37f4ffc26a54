"""On an NVIDIA GPU: a panel of GPTQ equals its definition on the CPU to the bit."""

import pytest
import torch

from pt2mx import SCALE_FORMATS, MXSpec
from pt2mx.kernels import gptq_panel
from pt2mx.kernels.select import run_step
from pt2mx.modes import ROUNDINGS
from tests.compare import same
from tests.pt2mx.kernels.cpu.test_gptq_panel import NARROW, SHAPES, panel

pytestmark = pytest.mark.cuda


def check(*args):
    """Columns, a factor, scales, a spec and bounds on the CPU."""
    on_gpu = (arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args)
    for actual, expected in zip(run_step("gptq_panel", *on_gpu), gptq_panel.round_panel(*args), strict=True):
        assert same(actual, expected), (args[3], expected.shape)


@pytest.mark.parametrize("name", [*NARROW, "int4", "fp5_e1m3", "fp4_e3m0"])
def test_every_format_and_rounding(name):
    for rounding in (name for name, rounding in ROUNDINGS.items() if not rounding.random):
        check(*panel(2, 70, 75), MXSpec(name, 32, rounding=rounding))


def test_every_shape():
    for shape in (*SHAPES, (1, 128, 8960)):
        check(*panel(*shape), MXSpec("mxfp4", 32))


def test_scales_with_a_significand_bounds_and_views():
    columns, factor, scale = panel(2, 80, 33)
    spec = MXSpec("mxfp4", 16, scale_mode="nearest", scale_format=SCALE_FORMATS["e4m3"])
    check(columns, factor, scale * (1 + torch.rand(scale.shape)), spec)
    low = columns - torch.rand(columns.shape)
    check(columns, factor, scale, MXSpec("mxint8", 32), low, low + torch.rand(columns.shape))
    middle = slice(10, 60)
    check(columns[:, middle], factor[:, middle, middle], scale.mT.contiguous().mT[:, middle], MXSpec("mxfp4"))


def test_values_that_are_not_finite():
    columns, factor, scale = panel(1, 20, 40)
    columns[0, 3, 5], columns[0, 4, 6], columns[0, 5, 7] = torch.inf, -torch.inf, torch.nan
    check(columns, factor, scale, MXSpec("mxfp4", 32))
