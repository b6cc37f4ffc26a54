"""The definition of accumulated matmuls, against exact fractions, by hand, and against results of a GPU.

`hopper.npz` holds FP8 matmuls of an NVIDIA H200, `torch._scaled_mm` of torch 2.11, 2026-11-30: x and other, (8, K)
bytes each, and the float32 results with `use_fast_accum` (`fast`) and without (`promoted`). `normal`: a normal
distribution. `wide`: its values times 2**-8 to 2**7. `any`: all finite bytes. `subnormal`: of a standard deviation of
2**-7.
"""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import pt2mx
from pt2mx.kernels.accumulated_matmul import matmul
from pt2mx.spec import ROW


def sums(x, other, text):
    return matmul(torch.tensor([x]), torch.tensor([other]).mT, pt2mx.parse_accumulator(text)).item()


def cut(value, unit):
    """Return the multiple of `unit` next to a fraction, toward zero."""
    return math.trunc(value / unit) * unit


def exponent(value, least=-math.inf):
    return max(math.frexp(float(value))[1] - 1, least)


def hopper(x, other, bits, group, promotion, least=(-math.inf, -math.inf)):
    """Return what the tensor cores of Hopper give for a row and a column, as MMA-Sim describes them. `least`: the
    exponents of the smallest normal values of both formats."""
    total = torch.zeros(())
    for start in range(0, len(x), min(promotion, len(x))):
        register = Fraction(0)
        for first in range(start, min(start + promotion, len(x)), group):
            pairs = [(a, b) for a, b in zip(x[first : first + group], other[first : first + group], strict=True)]
            terms = [
                (Fraction(a) * Fraction(b), exponent(a, least[0]) + exponent(b, least[1])) for a, b in pairs if a and b
            ]
            terms += [(register, exponent(register))] if register else []
            if terms:
                unit = Fraction(2) ** (max(e for _, e in terms) - bits)
                register = sum(cut(term, unit) for term, _ in terms)
                register = cut(register, Fraction(2) ** (exponent(register) - bits)) if register else register
        total = total + torch.tensor(float(register))
    return total.item()


@pytest.mark.diagonal
@pytest.mark.parametrize("text", ["hopper", "hopper(14)", "hopper{32,row}", "hopper(5){8,24}"])
@pytest.mark.parametrize("spec", ["mxfp8", "mxfp8_e5m2", "mxfp4"])
def test_hopper_is_the_published_model_of_the_hardware(text, spec):
    generator = torch.Generator().manual_seed(1)
    x, other = (pt2mx.fake_quantize_mx(torch.randn(n, 150, generator=generator), spec) for n in (4, 5))
    a = pt2mx.parse_accumulator(text)
    want = [[hopper(row, column, *a.numbers, a.group, a.promotion) for column in other.tolist()] for row in x.tolist()]
    assert matmul(x, other.mT, a).tolist() == want


RECORDED = np.load(Path(__file__).with_name("hopper.npz"))
CASES = sorted({name.rpartition(".")[0] for name in RECORDED.files})
#: recorded result -> the order of its sums
ORDERS = {"fast": "hopper{32,row}", "promoted": "hopper{32,128}"}
SMALLEST_NORMAL = {"e4m3": -6, "e5m2": -14}


def recorded(case):
    """Return x and other, (8, K) float32."""
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    x, other = (torch.from_numpy(RECORDED[f"{case}.{name}"]) for name in ("x", "other"))
    return x.view(dtypes[case.split(".")[1]]).float(), other.view(torch.float8_e4m3fn).float()


@pytest.mark.diagonal
@pytest.mark.parametrize("result", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gave_these_values(case, result):
    x, other = recorded(case)
    equal = matmul(x, other.mT, pt2mx.parse_accumulator(ORDERS[result])).numpy() == RECORDED[f"{case}.{result}"]
    # one value of 64 is cut at another bit, where subnormal values of E5M2 have the largest exponent
    assert equal.sum() >= (63 if case == "subnormal.e5m2.128" else 64)


@pytest.mark.diagonal
@pytest.mark.parametrize("result", ORDERS)
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith(".512")])
def test_a_gpu_aligns_subnormals_like_the_smallest_normal(case, result):
    x, other = recorded(case)
    accumulator = pt2mx.parse_accumulator(ORDERS[result])
    rest = (*accumulator.numbers, accumulator.group, accumulator.promotion)
    least = SMALLEST_NORMAL[case.split(".")[1]], SMALLEST_NORMAL["e4m3"]
    want = [[hopper(row, column, *rest, least) for column in other.tolist()] for row in x.tolist()]
    assert want == RECORDED[f"{case}.{result}"].tolist()


@pytest.mark.parametrize(
    ("x", "other", "text", "want"),
    [
        # exponents of factors are added: 1.5 * 1.5 counts as 2**0, so that 2**-13 is not cut off
        ([1.5, 2.0**-13, 2.0**-13], [1.5, 1.0, 1.0], "hopper", 2.25 + 2.0**-12),
        ([1.0, 2.0**-13], [1.0, 1.0], "hopper", 1 + 2.0**-13),
        ([1.0, 2.0**-14], [1.0, 1.0], "hopper", 1.0),
        ([1.0, 2.0**-14], [1.0, 1.0], "hopper(14)", 1 + 2.0**-14),
        ([1.0, -(2.0**-14)], [1.0, 1.0], "hopper", 1.0),  # cut toward zero
        ([1.0] + [2.0**-14] * 127, [1.0] * 128, "hopper{32,32}", 1 + 96 * 2.0**-14),  # the first group loses its own
        ([256.0, 1.0, 1.0], [1.0] * 3, "bfloat16{1}", 256.0),
        ([256.0, 1.0, 1.0], [1.0] * 3, "bfloat16{32}", 258.0),
        ([256.0, 1.0, 1.0], [1.0] * 3, "bfloat16{1,1}", 258.0),
        ([60000.0, 6000.0], [1.0, 1.0], "float16{1}", math.inf),
        ([60000.0, 6000.0, -6000.0], [1.0] * 3, "float16{32}", 60000.0),  # it saturates where it is rounded, only
        ([7.0, 7.0], [1.0, 1.0], "fixed(3,2)", 7.75),
        ([-7.0, -7.0], [1.0, 1.0], "fixed(3,2)", -8.0),
        ([0.375, 0.375], [1.0, 1.0], "fixed(3,2){1}", 1.0),  # 0.375 is a tie to 0.5, 0.875 one to 1.0
        ([0.125], [1.0], "fixed(3,2)", 0.0),
        ([2.0**24, 1.0, 1.0], [1.0] * 3, "float32{1}", 2.0**24),
        ([math.inf, 1.0], [1.0, 1.0], "fixed(3,2)", math.inf),
    ],
)
def test_by_hand(x, other, text, want):
    assert sums(x, other, text) == want


@pytest.mark.parametrize("text", ["float32{32}", "bfloat16", "float16", "fixed(8,8)", "hopper"])
def test_nan_stays(text):
    assert math.isnan(sums([math.nan, 1.0], [0.0, 1.0], text)) and math.isnan(sums([math.inf, 1.0], [0.0, 1.0], text))


def test_nothing_to_add_is_zero():
    accumulator = pt2mx.Accumulator("hopper", (13,), ROW, ROW)
    assert torch.equal(matmul(torch.ones(2, 0), torch.ones(0, 3), accumulator), torch.zeros(2, 3))
    assert matmul(torch.ones(0, 4), torch.ones(4, 3), accumulator).shape == (0, 3)
    assert torch.equal(matmul(torch.zeros(2, 4), torch.zeros(4, 3), accumulator), torch.zeros(2, 3))
