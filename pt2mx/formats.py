"""The format table: every number that an algorithm needs to know of an MX format is a field of a row here.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 5 (element formats).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# relative: mx_conformance, which runs without torch and so without pt2mx, has links to this file and to errors.py
from .errors import MXError, nearest


@dataclass(frozen=True)
class ElementFormat:
    """One element format: sign, `exponent_bits`, `mantissa_bits` (OCP MX v1.0, section 5.3).

    A value's magnitude is `2**(max(exponent, 1) - bias)` times its significand. An integer element is a fixed-point
    number with one binade: its magnitude is read as a float with one exponent bit and bias 1, and only the sign is
    stored in another way (two's complement). `pt2mx.ELEMENTS` holds every element format; `parse_element` finds one.

    Args:
        name: the canonical name, as operators and files hold it.
        exponent_bits: bits of the exponent.
        mantissa_bits: stored bits of the significand.
        bias: the stored exponent minus the exponent.
        emax: exponent of the largest normal.
        max_normal: value of the largest normal.
        has_inf: True if some codes are Inf.
        has_nan: True if some codes are NaN.
        is_int: True for an integer in two's complement.
        full_range: True for an integer that uses the most negative code too.

    Example:
        >>> import pt2mx
        >>> e4m3 = pt2mx.ELEMENTS["fp8_e4m3"]
        >>> e4m3.bits, e4m3.max_normal, e4m3.emin, e4m3.has_inf
        (8, 448.0, -6, False)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    emax: int
    max_normal: float
    has_inf: bool = False
    has_nan: bool = False
    is_int: bool = False
    full_range: bool = False

    # properties, not fields: Dynamo makes a frozen dataclass anew by passing every field
    @property
    def bits(self) -> int:
        """The bits of one code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def is_wide(self) -> bool:
        """True if a code takes two bytes; only the reference kernel supports such elements."""
        return self.bits > 8

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal; below it values are multiples of `2**(emin - mantissa_bits)`."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """The code of `max_normal` without its sign; codes above it are Inf and NaN where the format has them."""
        significand = round(self.max_normal / 2.0**self.emax * 2**self.mantissa_bits)
        return ((self.emax + self.bias - 1) << self.mantissa_bits) + significand

    @property
    def unit(self) -> float:
        """The value of an integer's code 1, which scales with a significand count; 1 for a float."""
        return 2.0**-self.mantissa_bits if self.is_int else 1.0

    @property
    def lowest(self) -> float:
        """The most negative value; `-max_normal` but in a full-range integer."""
        return -self.max_normal - (2.0**-self.mantissa_bits if self.full_range else 0.0)

    def __str__(self) -> str:
        return self.name


_TABLE = (
    #             name        exp man bias emax max_normal
    ElementFormat("fp8_e4m3", 4, 3, 7, 8, 448.0, has_nan=True),
    ElementFormat("fp8_e5m2", 5, 2, 15, 15, 57344.0, has_inf=True, has_nan=True),
    ElementFormat("fp6_e3m2", 3, 2, 3, 4, 28.0),
    ElementFormat("fp6_e2m3", 2, 3, 1, 2, 7.5),
    ElementFormat("fp4_e2m1", 2, 1, 1, 2, 6.0),
    ElementFormat("int8", 1, 6, 1, 0, 127 / 64, is_int=True),
)

#: The six element formats of the OCP specification, by canonical name.
FORMATS: dict[str, ElementFormat] = {f.name: f for f in _TABLE}


#: Bits of the widest element, sign included.
_WIDEST = 16
#: Bits of the widest exponent: every code being a number, 8 bits would reach 2**129, which fp32 does not hold.
_WIDEST_EXPONENT = 7


def _float(exponent_bits: int, mantissa_bits: int, suffix: str = "") -> ElementFormat:
    """Return the finite-only float of that split: every code is a number."""
    bias = 2 ** (exponent_bits - 1) - 1
    emax = 2**exponent_bits - 1 - bias
    name = f"fp{1 + exponent_bits + mantissa_bits}_e{exponent_bits}m{mantissa_bits}{suffix}"
    return ElementFormat(name, exponent_bits, mantissa_bits, bias, emax, (2 - 2.0**-mantissa_bits) * 2.0**emax)


def _integer(bits: int, full_range: bool) -> ElementFormat:
    """Return the integer of that width times `2**(2 - bits)`: the element of block floating point."""
    name = f"int{bits}" + ("_full" if full_range else "")
    return ElementFormat(name, 1, bits - 2, 1, 0, 2 - 2.0 ** (2 - bits), is_int=True, full_range=full_range)


#: Every element format: all splits of up to 16 bits into a sign, 1 to 7 exponent bits and a mantissa; integers of 2 to
#: 16 bits, symmetric and with the full range of two's complement; the rows of the OCP specification as it states them,
#: and of those with special values the finite-only floats of the same split (`fp8_e4m3_finite` reaches 480).
ELEMENTS: dict[str, ElementFormat] = {
    f.name: f
    for f in (
        *(_float(f.exponent_bits, f.mantissa_bits, "_finite") for f in _TABLE if f.has_nan),
        *(_float(e, m) for e in range(1, _WIDEST_EXPONENT + 1) for m in range(_WIDEST - e)),
        *(_integer(bits, full_range) for bits in range(2, _WIDEST + 1) for full_range in (False, True)),
        *_TABLE,
    )
}

# A bare width names the format with the finer grid of the two that OCP defines at that width.
_DEFAULT_OF_WIDTH = {"fp8": "fp8_e4m3", "fp6": "fp6_e2m3", "fp4": "fp4_e2m1"}
#: spellings that errors suggest; those with E4M3 scales name no element, but a spec
SPELLINGS = (*FORMATS, *(f"mx{name}" for name in FORMATS), *(f"mx{width}" for width in _DEFAULT_OF_WIDTH))
NV_SPELLINGS = ("nvfp4", *(f"nv{name}" for name in FORMATS))
_DTYPE_NAMES = {
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float4_e2m1fn_x2": "fp4_e2m1",
    "float6_e2m3fn": "fp6_e2m3",
    "float6_e3m2fn": "fp6_e3m2",
}
_SPLITS = {(f.exponent_bits, f.mantissa_bits): name for name, f in ELEMENTS.items() if not f.is_int}
# no exponent: the integer with that many bits after the sign
_SPLITS |= {(0, f.bits - 1): name for name, f in ELEMENTS.items() if f.is_int and not f.full_range}
# Compiled here: torch.compile traces a call with a spelling, and cannot trace the compilation of a pattern.
_SPLIT = re.compile(r"e(\d)m(\d\d?)", re.ASCII)
_SPELLING = re.compile(
    r"(?:mx)?(?P<kind>fp|float|int)(?P<bits>\d\d?)"
    r"(?:_?(?P<split>e\dm\d\d?(?:_finite)?|full)|\[(?P<bracketed>e\dm\d\d?)\])?",
    re.ASCII,
)


def parse_element(spelling: object) -> ElementFormat:
    """Return the element format that a spelling names.

    Args:
        spelling: an `ElementFormat`; a torch dtype (`torch.float8_e4m3fn`, `torch.float4_e2m1fn_x2`, ...) or its name;
            a pair `(exponent bits, mantissa bits)`, an integer having no exponent bits; `"fp4_e2m1"`, `"float4_e2m1"`,
            `"mxfp4_e2m1"`, `"MXFP4[E2M1]"`, `"e2m1"`, `"fp8_e4m3_finite"`; `"int4"`, `"int4_full"`; or a bare width
            (`"mxfp8"` is E4M3, `"mxfp6"` is E2M3).

    Returns:
        The row of `pt2mx.ELEMENTS`, or the `ElementFormat` that was given.

    Raises:
        MXError: for anything else, naming the nearest valid spelling.

    Example:
        >>> import torch, pt2mx
        >>> pt2mx.parse_element("mxfp4").name, pt2mx.parse_element(torch.float8_e5m2).name
        ('fp4_e2m1', 'fp8_e5m2')
        >>> pt2mx.parse_element((0, 7)).name
        'int8'
    """
    if isinstance(spelling, ElementFormat):
        return spelling
    name = _name_of(spelling)
    if name not in ELEMENTS:
        raise MXError(
            f"unknown MX element format {spelling!r}: {nearest(spelling, SPELLINGS)}, int2 to int{_WIDEST}, and "
            f"fp<bits>_eXmY with 1 to {_WIDEST_EXPONENT} exponent bits and at most {_WIDEST} bits"
        )
    return ELEMENTS[name]


def is_element(spelling: object) -> bool:
    """Return whether `parse_element` takes a spelling."""
    return isinstance(spelling, ElementFormat) or _name_of(spelling) in ELEMENTS


def _name_of(spelling: object) -> str | None:
    if isinstance(spelling, tuple):
        return _SPLITS.get(spelling) if all(isinstance(bits, int) for bits in spelling) else None
    # of an object the name, where it has one: torch.compile makes a constant of `str` of it, and would not see that
    # another object comes in
    return _canonical_name(str(getattr(spelling, "name", spelling)).strip().lower().removeprefix("torch."))


def _canonical_name(text: str) -> str | None:
    if text in _DTYPE_NAMES:
        return _DTYPE_NAMES[text]
    if split := _SPLIT.fullmatch(text):
        return _SPLITS.get((int(split[1]), int(split[2])))
    match = _SPELLING.fullmatch(text)
    if match is None:
        return None
    width = ("int" if match["kind"] == "int" else "fp") + match["bits"]
    suffix = match["split"] or match["bracketed"]
    return f"{width}_{suffix}" if suffix else _DEFAULT_OF_WIDTH.get(width, width)
