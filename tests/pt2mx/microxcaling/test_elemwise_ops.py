import math
from fractions import Fraction

import pytest
import torch

from pt2mx import MXError
from pt2mx.microxcaling import MxSpecs, quantize_bfloat, quantize_elemwise_op

# over all binades of fp32, with ties of every width, and the edges of fp16 and bfloat16
EDGES = [0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 65519.0, 65520.0, 65535.0, 65536.0, 3.39e38, 3.4028e38]
TINY = [2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-133, 3 * 2.0**-134, 1e-45, -1e-45, 2.0**-126, 6.1e-5]


def numbers() -> torch.Tensor:
    torch.manual_seed(0)
    mantissas = torch.randint(0, 1 << 12, (4000,)) / 2048 - 1
    return torch.cat(
        [mantissas * torch.randint(-149, 128, (4000,)).double().exp2().float(), torch.tensor(EDGES + TINY)]
    )


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)) and torch.equal(a.isnan(), b.isnan())


def test_to_even_it_is_the_cast():
    x = numbers()
    assert equal(quantize_elemwise_op(x, {"bfloat": 16, "round": "even"}), x.bfloat16().float())
    assert equal(quantize_elemwise_op(x, {"fp": 16, "round": "even"}), x.half().float())
    y = quantize_elemwise_op(x.half(), {"fp": 16}, "floor")
    assert equal(y, x.half())


def exactly(x: float, exponent_bits: int, mantissa_bits: int, round: str, subnormals: bool) -> float:
    if not math.isfinite(x) or x == 0:
        return x
    emin, emax = 2 - 2 ** (exponent_bits - 1), 2 ** (exponent_bits - 1) - 1
    if not subnormals and abs(x) < 2.0**emin:
        return 0.0
    step = Fraction(2) ** (max(math.frexp(x)[1] - 1, emin) - mantissa_bits)
    units = abs(Fraction(x)) / step
    down = math.floor(units)
    above = units - down
    up = {
        "floor": False,
        "nearest": above >= Fraction(1, 2),
        "even": above > Fraction(1, 2) or (above == Fraction(1, 2) and down % 2 == 1),
    }
    magnitude = (down + up[round]) * step
    largest = Fraction(2) ** emax * (2 - Fraction(1, 2**mantissa_bits))
    return math.copysign(math.inf if magnitude > largest else float(magnitude), x)


@pytest.mark.diagonal
@pytest.mark.parametrize("subnormals", [True, False])
@pytest.mark.parametrize("round", ["nearest", "floor", "even"])
@pytest.mark.parametrize(
    ("key", "bits"), [("bfloat", 10), ("bfloat", 16), ("bfloat", 19), ("fp", 7), ("fp", 16), ("fp", 13)]
)
def test_values(key, bits, round, subnormals):
    x = numbers()[::3]
    exponent_bits = 8 if key == "bfloat" else 5
    want = [exactly(v, exponent_bits, bits - 1 - exponent_bits, round, subnormals) for v in x.tolist()]
    got = quantize_elemwise_op(x, MxSpecs({key: bits, "bfloat_subnorms": subnormals}), round)
    assert equal(got, torch.tensor(want, dtype=torch.float64).float())


def test_nothing_to_round():
    x = numbers()
    for specs in (None, MxSpecs(), {"bfloat": 32}, {"block_size": 32}):
        assert quantize_elemwise_op(x, specs) is x
    assert equal(quantize_elemwise_op(x, {"bfloat": 40}), x)


def test_dither_is_unbiased():
    y = quantize_elemwise_op(torch.full((20_000,), 1.3), {"bfloat": 10, "round": "dither"})
    assert set(y.tolist()) == {1.0, 1.5} and abs(y.mean() - 1.3) < 5 * 0.25 / 20_000**0.5


def test_the_gradient_of_quantize_bfloat_is_rounded():
    x, weight = torch.randn(64, requires_grad=True), torch.randn(64)
    for backprop in (True, False):
        specs = {"bfloat": 12, "round": "even", "quantize_backprop": backprop}
        x.grad = None
        y = quantize_bfloat(x, specs)
        (y * weight).sum().backward()
        assert torch.equal(y, quantize_elemwise_op(x, specs)) and not torch.equal(y, x)
        assert torch.equal(x.grad, quantize_elemwise_op(weight, specs) if backprop else weight)
    assert torch.equal(quantize_bfloat(x, {"bfloat": 12}, "floor"), quantize_elemwise_op(x, {"bfloat": 12}, "floor"))
    assert quantize_bfloat(x, None) is x


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        ({"bfloat": 16, "fp": 16}, "mx_specs set both bfloat=16 and fp=16"),
        ({"bfloat": 9}, "bfloat=9 must be an integer above 9"),
        ({"fp": 6}, "fp=6 must be an integer above 6"),
        ({"fp": -16}, "fp=-16"),
        ({"bfloat": 16, "round": "up"}, "unknown round 'up': allowed: nearest, floor, even, dither"),
    ],
)
def test_errors(specs, match):
    with pytest.raises(MXError, match=match):
        quantize_elemwise_op(torch.ones(2), specs)
    with pytest.raises(MXError, match=r"torch\.int64"):
        quantize_elemwise_op(torch.ones(2, dtype=torch.int64), {"bfloat": 16})
