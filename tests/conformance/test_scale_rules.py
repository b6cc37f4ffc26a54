"""The scale rule of an implementation is named, and no deviation: section 6.3 leaves it open."""

from functools import partial

import numpy as np
import pytest
import torch

from mx_conformance import check
from pt2mx import fake_quantize_mx, quantize_mx, register_scale_mode
from pt2mx.compat import PRESETS
from tests.conformance import nki
from tests.conformance.implementations import PLANTED


@pytest.mark.parametrize("element", nki.ELEMENTS)
def test_the_rule_of_trainium3_is_doubled(element):
    quantize = partial(nki.quantize_mx, element=element)
    result = check(quantize, format=element, framework="numpy")
    assert (result.deviations, result.other_scales) == (0, 0) and result.conforms
    assert (result.scale_mode, result.rounding) == ("doubled", "even")
    assert result.choices == ("scale rule doubled", "refuses lengths that 32 does not divide")


def test_a_claim_of_another_rule_does_not_conform():
    result = check(partial(nki.quantize_mx, element="fp8_e4m3"), format="mxfp8", framework="numpy", scale_mode="floor")
    assert not result.conforms and result.deviations == 0 < result.other_scales
    scale_rule = next(row for row in result.rows if row.verdict == "other scale")
    assert scale_rule.corner == "scale rule" and scale_rule.example.endswith("; it follows scale rule doubled")
    assert "no deviation, " in str(result).splitlines()[0]


@pytest.mark.parametrize("element", nki.ELEMENTS)
def test_the_preset_has_the_bytes_of_the_documented_rule(element):
    x = torch.randn(64, 128) * torch.exp2(torch.randint(-140, 120, (64, 1)).float())
    x[3, 40], x[5], x[7, 9] = torch.nan, 0.0, torch.inf
    finite = ~(x.view(64, 4, 32).isfinite().all(-1)).repeat_interleave(32, -1)
    scale, data = PRESETS["nki"].quantize(x, element)
    want_scale, want_data = nki.quantize_mx(x.numpy(), element)
    assert np.array_equal(scale.numpy(), want_scale)
    assert np.array_equal(data.masked_fill(finite, 0).numpy(), np.where(finite, 0, want_data))


def scale_of_a_fifth(blocks, element):
    return blocks.abs().amax(-1) / 5


@pytest.mark.parametrize("quantize", [quantize_mx, fake_quantize_mx])
def test_a_rule_of_nobody_conforms(quantize):
    register_scale_mode("a_fifth", scale_of_a_fifth)
    result = check(lambda x: quantize(x, "mxfp4(a_fifth)"))
    assert result.conforms and result.scale_mode == "none of these" and result.rounding == "even"
    assert "scale rule none of these" in result.choices and result.other_scales > 100


def test_elements_must_fit_the_scale_that_was_chosen():
    def quantize(x):
        scale, data = quantize_mx(x, "mxfp4")
        return (scale + (scale > 0)).byte(), data  # twice each value

    result = check(quantize)
    assert not result.conforms and result.deviations > 1500 and result.other_scales == 0


def test_a_fault_of_the_scale_is_no_deviation():
    result = check(**{**PLANTED["rounded log2"].arguments, "scale_mode": None})
    row = next(row for row in result.rows if row.corner == "powers of two")
    assert (result.scale_mode, row.verdict, row.deviations, row.other_scales) == ("floor", "other scale", 0, 248)
