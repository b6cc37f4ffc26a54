"""`Claim`: the conventions of an implementation, and those among them that the specification leaves open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pt2mx.conformance.packing import packings
from pt2mx.errors import MXError, nearest
from pt2mx.formats import ELEMENTS, FORMATS, ElementFormat, parse_element
from pt2mx.modes import ROUNDINGS, SCALE_MODES, scale_modes
from pt2mx.scale_formats import SCALE_FORMATS


@dataclass(frozen=True)
class Claim:
    """One format, and what an implementation says of its conventions. None leaves a convention to detection.

    Args:
        element: one of the six elements of the specification.
        scale_mode: the rule of the shared exponent, a key of `SCALE_MODES`.
        rounding: a key of `ROUNDINGS` other than "stochastic".
        full_range: True if integers use the code -128.
        packing: the order of codes in bytes, a key of `PACKINGS`.
    """

    element: ElementFormat
    scale_mode: str | None = None
    rounding: str | None = None
    full_range: bool | None = None
    packing: str | None = None

    def with_defaults(self) -> Claim:
        """Return the claim with the default of each convention that is None."""
        unset: dict[str, Any] = {
            name: choice.default for name, choice in CHOICES.items() if getattr(self, name) is None
        }
        return dataclasses.replace(self, **unset)

    @property
    def target(self) -> ElementFormat:
        """The element whose values results have: for a full range of integers another row of `ELEMENTS`."""
        return ELEMENTS[f"{self.element.name}_full"] if self.full_range and self.element.is_int else self.element

    @property
    def section(self) -> str:
        """The section of the specification that defines the element."""
        return "5.3.4" if self.element.is_int else {8: "5.3.1", 6: "5.3.2", 4: "5.3.3"}[self.element.bits]


@dataclass(frozen=True)
class Choice:
    """A convention that the specification leaves open.

    Args:
        default: what the specification describes first, and pt2mx does.
        allowed: (element) -> the values that it can have.
        words: (value) -> the words for it in a table.
    """

    default: object
    allowed: Callable[[ElementFormat], tuple[Any, ...]]
    words: Callable[[Any], str]


#: mantissa bits whose "even" is tried for every element: some libraries round amax like that of another element
EVEN_OF = range(4)


def _modes(element: ElementFormat) -> tuple[str, ...]:
    """Return the scale modes that follow from amax alone; a search by errors is tried only where it is claimed."""
    modes = scale_modes(SCALE_FORMATS["e8m0"], element)
    others = [f"even_m{bits}" for bits in EVEN_OF if bits != element.mantissa_bits]
    return (*(name for name in modes if not SCALE_MODES[name].searches), *others)


#: field of `Claim` -> the convention
CHOICES: dict[str, Choice] = {
    "packing": Choice("low_first", packings, lambda value: f"codes packed {value}"),
    "scale_mode": Choice("floor", _modes, lambda value: f"scale rule {value}"),
    "rounding": Choice(
        "even",
        lambda element: tuple(name for name, rounding in ROUNDINGS.items() if not rounding.random),
        lambda value: f"rounding {value}",
    ),
    "full_range": Choice(
        False,
        lambda element: (False, True) if element.is_int else (False,),
        lambda value: "code -128 in use" if value else "code -128 not in use",
    ),
}


def parse_claim(format: object, **conventions: Any) -> Claim:
    """Return the claim of a format and conventions by name; None leaves a convention to detection.

    Raises:
        MXError: for a format that is not one of the specification, and a value that a convention does not have.
    """
    element = parse_element(format)
    if element.name not in FORMATS:
        raise MXError(f"format={format!r} is not in the specification: {nearest(format, FORMATS)}")
    for name, value in conventions.items():
        allowed = CHOICES[name].allowed(element)
        if name == "scale_mode":
            allowed += tuple(mode for mode in scale_modes(SCALE_FORMATS["e8m0"], element) if mode not in allowed)
        if value is not None and (value not in allowed or isinstance(value, int) != isinstance(allowed[0], bool)):
            raise MXError(f"{name}={value!r} of {element}: {nearest(value, map(str, allowed))}, or None to detect it")
    return Claim(element, **conventions)
