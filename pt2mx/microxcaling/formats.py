"""The names of element formats and roundings, and what they are in pt2mx."""

from __future__ import annotations

from enum import Enum, IntEnum

from pt2mx.errors import MXError, nearest


class RoundingMode(IntEnum):
    """microxcaling's `RoundingMode`: roundings by number; functions take their names.

    Example:
        >>> from pt2mx import microxcaling as mx
        >>> mx.RoundingMode.even.value
        2
        >>> mx.RoundingMode.string_enums()
        ['nearest', 'floor', 'even']
    """

    nearest = 0
    floor = 1
    even = 2

    @staticmethod
    def string_enums() -> list[str]:
        """Return the names.

        Returns:
            One for each number, in order.
        """
        return [mode.name for mode in RoundingMode]


class ElemFormat(Enum):
    """microxcaling's `ElemFormat`: element formats by number; a number may have several names.

    The 16-bit floats are here for their numbers: they are no elements of MX blocks.

    Example:
        >>> from pt2mx import microxcaling as mx
        >>> mx.ElemFormat.from_str("FP4_E2M1")
        <ElemFormat.fp4: 8>
    """

    int8 = 1
    int4 = 2
    int2 = 3
    fp8_e5m2 = 4
    fp8_e4m3 = 5
    fp6_e3m2 = 6
    fp6_e2m3 = 7
    fp4 = 8
    fp4_e2m1 = 8
    float16 = 9
    fp16 = 9
    bfloat16 = 10
    bf16 = 10

    @staticmethod
    def from_str(s: str) -> ElemFormat:
        """Return the format of a name.

        Args:
            s: the name, in upper or lower case.

        Returns:
            The member of `ElemFormat`.

        Raises:
            MXError: for another name.
        """
        names = ElemFormat.__members__
        if not isinstance(s, str) or s.lower() not in names:
            raise MXError(f"unknown elem_format {s!r}: {nearest(s, names)}")
        return names[s.lower()]


#: roundings by name, as `pt2mx.modes` calls them
ROUNDINGS = {"nearest": "half_away", "floor": "toward_zero", "even": "even", "dither": "stochastic"}


def element_name(elem_format: ElemFormat | str) -> str:
    """Return the element's name in pt2mx.

    Raises:
        MXError: for an unknown format, and for 16-bit floats, which are no elements of MX blocks.
    """
    if not isinstance(elem_format, ElemFormat):
        elem_format = ElemFormat.from_str(elem_format)
    if elem_format in (ElemFormat.float16, ElemFormat.bfloat16):
        raise MXError(
            f"{elem_format.name} is no element of MX blocks: bfloat=16 and fp=16 in mx_specs round without blocks"
        )
    return elem_format.name


def rounding_name(round: str) -> str:
    """Return the rounding's name in pt2mx; `MXError` for an unknown one."""
    if not isinstance(round, str) or round not in ROUNDINGS:
        raise MXError(f"unknown round {round!r}: {nearest(round, ROUNDINGS)}")
    return ROUNDINGS[round]
