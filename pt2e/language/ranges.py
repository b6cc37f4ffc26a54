"""The ranges of the options of sampling. This module imports no torch, so that the command line is checked at once."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import NamedTuple


class _Range(NamedTuple):
    """The numbers that an option takes; `text` says it in words."""

    kind: type
    least: float
    most: float
    text: str
    #: bounds that are not in the range
    open: tuple[float, ...] = ()


_SHARE = _Range(Real, 0, 1, "a number from 0 to 1")

#: option of transformers' `generate` -> its range. transformers checks only some; a `top_p` above 1 disables the filter
RANGES = {
    "temperature": _Range(Real, 0, math.inf, "a finite number of at least 0", (math.inf,)),
    "top_k": _Range(Integral, 0, math.inf, "an integer of at least 0, which is all tokens"),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_h": _Range(Real, 0, 1, "a number above 0, up to 1", (0,)),
    "typical_p": _Range(Real, 0, 1, "a number above 0, up to 1", (0,)),
    "epsilon_cutoff": _Range(Real, 0, 1, "a number from 0, below 1", (1,)),
    "eta_cutoff": _Range(Real, 0, 1, "a number from 0, below 1", (1,)),
    "repetition_penalty": _Range(Real, 0, math.inf, "a finite number above 0", (0, math.inf)),
}


def fault_of(option: str, value: object) -> str | None:
    """Return the end of an error message for the value of an option; None where the value is valid."""
    kind, least, most, text, excluded = RANGES[option]
    number = isinstance(value, kind) and not isinstance(value, bool)
    if number and least <= value <= most and value not in excluded:  # type: ignore[operator] # NaN is in no range
        return None
    return f"must be {text}"
