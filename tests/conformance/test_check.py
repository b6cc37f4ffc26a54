"""Every planted fault is found in its corner, with the section of the specification and the smallest failing input."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mx_conformance
from mx_conformance import check
from mx_conformance.errors import MXError
from pt2mx import FORMATS, dequantize_mx, fake_quantize_mx, quantize_mx
from tests.conformance.implementations import PLANTED


@pytest.mark.compiled_cases("other ties than claimed", "code -128", "subnormals flushed")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_named(name):
    planted = PLANTED[name]
    result = check(**planted.arguments)
    failing = {row.corner: row for row in result.rows if row.verdict in ("deviation", "other scale")}
    assert {corner: row.section for corner, row in failing.items()}.items() >= planted.corners.items()
    assert next(iter(failing)) == next(iter(planted.corners))
    assert planted.example in next(iter(failing.values())).example
    assert not result.conforms and result.deviations == sum(row.deviations for row in failing.values())


@pytest.mark.parametrize(
    "format", [pytest.param(f, marks=[pytest.mark.slow] * (f in ("fp8_e5m2", "fp6_e3m2"))) for f in FORMATS]
)
def test_the_definition_has_no_deviation(format):
    result = check(
        lambda x: quantize_mx(x, format),
        lambda data, scale: dequantize_mx(data, scale, format),
        format,
        scale_mode="floor",
        rounding="even",
    )
    assert result.conforms and result.choices == () and result.cases > 2000
    assert (result.name, result.format, result.scale_mode, result.rounding) == (
        "<lambda>",
        f"mx{format}",
        "floor",
        "even",
    )


@pytest.mark.slow_cases("int8-modes2-choices2")
@pytest.mark.parametrize(
    ("format", "modes", "choices"),
    [
        ("fp4_e2m1", {"rounding": "half_away", "scale_mode": "rceil"}, ("rounding half_away", "scale rule rceil")),
        ("fp6_e2m3", {"rounding": "toward_zero", "scale_mode": "ceil"}, ("rounding toward_zero", "scale rule ceil")),
        ("int8", {"rounding": "up", "scale_mode": "even"}, ("rounding up", "scale rule even")),
    ],
)
def test_open_conventions_are_detected_and_allowed(format, modes, choices):
    result = check(lambda x: fake_quantize_mx(x, format, **modes), format=format)
    assert result.conforms and result.choices == choices
    assert (result.scale_mode, result.rounding) == (modes["scale_mode"], modes["rounding"])


@pytest.mark.parametrize("name", ["one wrong tie", "floor instead of even"])
def test_inputs_of_16_bits(name):
    arguments, corners, _ = PLANTED[name]

    def quantize(x):
        assert x.dtype == torch.bfloat16
        result = arguments["quantize"](x.float())
        return result if isinstance(result, tuple) else result.bfloat16()

    result = check(**{**arguments, "quantize": quantize, "dtype": "bfloat16"})
    failing = {row.corner: row.section for row in result.rows if row.verdict in ("deviation", "other scale")}
    assert failing.items() >= corners.items() and next(iter(failing)) == next(iter(corners))
    assert check(lambda x: fake_quantize_mx(x, "mxfp4"), rounding="even", dtype="bfloat16").conforms


def test_other_choices_are_named():
    def quantize(x):
        if x.shape[1] % 32:
            raise ValueError("blocks of 32")
        kept = torch.where(x.isfinite(), x, 0.0)
        scale, data = quantize_mx(kept, "mxfp8")
        data[x.isnan()] = 0x7F
        return torch.where((kept == 0).all(-1, keepdim=True), 127, scale).byte(), data

    result = check(quantize, format="mxfp8")
    assert result.conforms
    assert result.choices == (
        "scale byte 127 of zero blocks",
        "NaN -> NaN, others kept",
        "Inf, -Inf -> 0, others kept",
        "refuses lengths that 32 does not divide",
    )


def test_elements_without_a_scale():
    def cast(x):
        return x.astype(np.float32).astype(np.float16).astype(np.float32)  # all values of E5M2, and more

    def round_to_int8(x):
        return np.clip(np.round(x * 64), -127, 127).astype(np.float32) / 64

    result = check(round_to_int8, format="mxint8", framework="numpy", elements_only=True)
    assert result.conforms and result.scale_mode == "-" and [row.corner for row in result.rows][-1] == "saturation"
    assert not check(cast, format="fp8_e5m2", framework="numpy", elements_only=True).conforms


def test_an_exception_in_a_corner_is_a_row():
    def quantize(x):
        if (x.abs() < 1e-38).logical_and(x != 0).any():
            raise ZeroDivisionError("subnormal")
        return fake_quantize_mx(x, "mxfp4")

    failing = {row.corner: row.example for row in check(quantize).rows if row.deviations}
    assert failing["small blocks"] == "raised ZeroDivisionError: subnormal"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantize": None}, "pass a callable"),
        ({"quantize": 3}, "pass a callable"),
        ({"format": "nvfp4{16}"}, "unknown MX element format"),
        ({"format": "int4"}, "format='int4' is not in the specification: did you mean 'int8'?"),
        ({"scale_mode": "flor"}, "scale_mode='flor' of fp4_e2m1: did you mean 'floor'?"),
        ({"scale_mode": "rceil_v2", "format": "mxfp8"}, "scale_mode='rceil_v2' of fp8_e4m3"),
        ({"rounding": "stochastic"}, "rounding='stochastic' of fp4_e2m1: "),
        ({"packing": "halves", "format": "mxfp6"}, "packing='halves' of fp6_e2m3"),
        ({"full_range": 1}, "full_range=1 of fp4_e2m1"),
        ({"dtype": "float16"}, "dtype='float16' of torch: use float32, or of torch bfloat16"),
        ({"dtype": "bfloat16", "framework": "numpy"}, "dtype='bfloat16' of numpy"),
        ({"framework": "jax"}, "framework='jax': "),
        ({"quantize": lambda x: x[:1]}, r"for x of shape \(2, 32\) it returned torch.float32 of shape \(1, 32\)"),
        ({"quantize": lambda x: x.int()}, "it returned torch.int32 of shape"),
        ({"quantize": lambda x: None}, "it returned NoneType"),
        ({"quantize": lambda x: (x, x, x)}, "it returned 3 results"),
        ({"quantize": lambda x: (x, x)}, "torch.float32 of shape .* and torch.float32"),
        ({"quantize": lambda x: quantize_mx(x, "mxfp4")[::-1]}, "it returned torch.uint8"),
        ({"quantize": lambda x: 1 / 0}, "quantize raised ZeroDivisionError for float32 values of shape"),
        ({"dequantize": lambda d, s: s}, r"must return a float array of shape \(2, 32\)"),
        ({"dequantize": lambda d, s: d.item()}, "dequantize raised RuntimeError for the codes and scales of two"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(MXError, match=message):
        check(**{"quantize": lambda x: fake_quantize_mx(x, "mxfp4"), **arguments})


WITHOUT_TORCH = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in ("torch", "pt2mx"), name

sys.meta_path.insert(0, Refused())
sys.path.insert(0, sys.argv[1])
from mx_conformance import check
from mx_conformance.__main__ import main
result = check(lambda x: x, format="mxfp4", framework="numpy", elements_only=True)
assert not result.conforms and main(["--implementation", "ml_dtypes", "--format", "mxfp4"]) == 0
"""


def test_numpy_is_enough():
    folder = Path(mx_conformance.__file__).parent.parent
    command = [sys.executable, "-c", WITHOUT_TORCH, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "ml_dtypes" in result.stdout
