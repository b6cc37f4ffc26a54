"""Round values to the values of a codebook, encode and decode them. Part of the definition (`pt2mx.kernels.elements`).

A rounding is a rule for whole numbers. Here it rounds the position between two values of the codebook, the values
being counted in ascending order from 0, which every codebook has.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pt2mx.formats import ElementFormat
from pt2mx.modes import ROUNDINGS


def round_to_value(v: Tensor, element: ElementFormat, rounding: str, random: Tensor | None = None) -> Tensor:
    """v: fp32 -> a neighbouring value of the codebook, saturated."""
    values = _like(v, sorted(element.values))
    if not ROUNDINGS[rounding].random:
        return values[_reached(v, first_of_each(element, rounding))]
    below = _reached(v, first_of_each(element, "down")).clamp(max=len(values) - 2)
    low, high = values[below], values[below + 1]
    near, far = torch.where(low < 0, high, low), torch.where(low < 0, low, high)
    way = ((v - near) / (high - low)).clamp(-1, 1)
    return torch.where(ROUNDINGS[rounding].to_quanta(way, random) == 0, near, far)


def encode(p: Tensor, element: ElementFormat) -> Tensor:
    """p: fp32 values of the codebook -> codes, int32."""
    ascending = sorted(element.values)
    codes = [element.values.index(value) for value in ascending]
    return torch.tensor(codes, dtype=torch.int32, device=p.device)[_reached(p, ascending[1:])]


def decode(codes: Tensor, element: ElementFormat) -> Tensor:
    """codes: int32 in [0, 2**bits) -> their values in fp32; NaN for codes beyond the codebook."""
    unused = (1 << element.bits) - len(element.values)
    return _like(codes, [*element.values, *[math.nan] * unused])[codes]


@functools.cache
def first_of_each(element: ElementFormat, rounding: str) -> list[float]:
    """Return for each value of a codebook but the least, ascending, the smallest fp32 number that becomes it, or a
    larger value."""
    ascending = sorted(element.values)
    zero, firsts = ascending.index(0), []
    for i, (low, high) in enumerate(pairwise(ascending)):
        middle = (Fraction(low) + Fraction(high)) / 2
        with _disable_current_modes():
            parts = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float32, device="cpu") + (i - zero)
            goes_up = (ROUNDINGS[rounding].to_quanta(parts, None) > i - zero).tolist()
        # a rounding goes up from anywhere above `low`, from the middle, from above the middle, or nowhere
        firsts.append([_above(Fraction(low)), _from(middle), _above(middle), high][[*goes_up, True].index(True)])
    return firsts


def _from(number: Fraction) -> float:
    """Return the smallest fp32 number that is at least this."""
    nearest = _fp32(float(number))
    return nearest if nearest >= number else _above(number)


def _above(number: Fraction) -> float:
    """Return the smallest normal fp32 number above this."""
    nearest = _fp32(float(number))
    if nearest > number:
        return nearest
    with _disable_current_modes():
        largest = torch.tensor(math.inf, device="cpu")
        value = torch.nextafter(torch.tensor(nearest, dtype=torch.float32, device="cpu"), largest.float()).item()
    return max(value, 2.0**-126) if value > 0 else value


def _fp32(number: float) -> float:
    with _disable_current_modes():
        return torch.tensor(number, dtype=torch.float32, device="cpu").item()


def _reached(v: Tensor, firsts: list[float]) -> Tensor:
    """Return how many of these ascending numbers v is at least."""
    return torch.bucketize(v.contiguous(), _like(v, firsts), right=True)


def _like(x: Tensor, numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=x.device)
