"""The ranges of the options by which tokens are sampled. transformers checks some of them, and takes others, such as a
`top_p` above 1, for a filter that is off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import NamedTuple

from pt2mx.errors import MXError


class _Range(NamedTuple):
    """The numbers that an option takes: those for which `holds`, which `text` says in words."""

    kind: type
    least: float
    most: float
    text: str
    #: the bounds that are not in the range themselves
    open: tuple[float, ...] = ()


_SHARE = _Range(Real, 0, 1, "a number from 0 to 1")

#: option of transformers' `generate` -> what it takes
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
    """Return what is wrong with the value of an option, as the end of a sentence; None: nothing is."""
    kind, least, most, text, excluded = RANGES[option]
    number = isinstance(value, kind) and not isinstance(value, bool)
    if number and least <= value <= most and value not in excluded:  # type: ignore[operator] # NaN is in no range
        return None
    return f"must be {text}"


def check_sampling(options: Mapping[str, object], defaults: object = None) -> None:
    """Check the options of `generate`.

    Args:
        options: as transformers' `generate` takes them, a `generation_config` among them.
        defaults: the generation config that holds without one.

    Raises:
        MXError: for a value out of its range, and for a temperature of 0 where tokens are sampled.
    """
    config = options.get("generation_config") or defaults
    values = {name: options.get(name, getattr(config, name, None)) for name in (*RANGES, "do_sample")}
    for name in RANGES:
        if values[name] is not None and (fault := fault_of(name, values[name])):
            raise MXError(f"{name}={values[name]!r} {fault}")
    if values["do_sample"] and values["temperature"] == 0:
        raise MXError("temperature=0 divides by 0: give do_sample=False for the likeliest tokens")
