"""The format table: every number that an algorithm needs to know of an MX format is a field of a row here.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 5 (element formats).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

# relative: mx_conformance, which runs without torch and so without pt2mx, has links to this file and to errors.py
from .errors import MXError, check_integer, nearest


@dataclass(frozen=True)
class ElementFormat:
    """One element format: sign, `exponent_bits`, `mantissa_bits` (OCP MX v1.0, section 5.3).

    A value's magnitude is `2**(max(exponent, 1) - bias)` times its significand. An integer element is a fixed-point
    number with one binade: its magnitude is read as a float with one exponent bit and bias 1, and only the sign is
    stored in another way (two's complement). A codebook lists the value of each code; its `mantissa_bits` are those of
    float32. `pt2mx.ELEMENTS` holds every element format; `parse_element` finds one, `register_element` adds one.

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
        values: of a codebook the value of each code, in the order of codes; else empty.

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
    values: tuple[float, ...] = field(default=(), repr=False)

    # properties, not fields: Dynamo makes a frozen dataclass anew by passing every field
    @property
    def bits(self) -> int:
        """The bits of one code, sign included."""
        return (len(self.values) - 1).bit_length() if self.values else 1 + self.exponent_bits + self.mantissa_bits

    @property
    def is_wide(self) -> bool:
        """True if a code takes two bytes; only the reference kernel supports such elements."""
        return self.bits > 8

    @property
    def is_registered(self) -> bool:
        """True if `register_element` added it; only the reference kernel supports such elements."""
        return self.name in REGISTERED

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
        """The most negative value; `-max_normal` but in a full-range integer and a codebook."""
        if self.values:
            return min(self.values)
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

#: the rows of `ELEMENTS` that kernels may know, and those that `register_element` added
BUILT_IN: dict[str, ElementFormat] = dict(ELEMENTS)
REGISTERED: dict[str, ElementFormat] = {}

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
            f"unknown MX element format {spelling!r}: {nearest(spelling, (*SPELLINGS, *REGISTERED))}, int2 to "
            f"int{_WIDEST}, and fp<bits>_eXmY with 1 to {_WIDEST_EXPONENT} exponent bits and at most {_WIDEST} bits; "
            "register one of your own before it is named (pt2mx.register_element; on the command line --import FILE.py)"
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
    if text.removeprefix("mx") in REGISTERED:
        return text.removeprefix("mx")
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


# the prefixes of spellings say scales, and `bfp` block floating point
_NEW_NAME = re.compile(r"(?!mx|nv|bfp)[a-z][a-z0-9_]*", re.ASCII)
#: exponents that leave room for scales in float32: of the smallest and of the largest value of a registered element
_LEAST_EXPONENT, _LARGEST_EXPONENT = -70, 64
_MOST_VALUES = 256


def register_element(
    name: str,
    *,
    exponent_bits: int = 0,
    mantissa_bits: int | None = None,
    bias: int | None = None,
    max_normal: float | None = None,
    has_inf: bool = False,
    has_nan: bool = False,
    full_range: bool = False,
    values: Sequence[float] = (),
) -> ElementFormat:
    """Add an element format to `pt2mx.ELEMENTS`, for this process: a float, an integer or a codebook.

    Every function, operator and graph then takes its name. Only the reference kernel computes it, also in compiled
    programs. A process that loads what names it registers it first.

    Args:
        name: lower-case letters, digits and `_`, in no spelling that `parse` takes already.
        exponent_bits: of a float 1 to 7; 0 for an integer.
        mantissa_bits: stored bits of a float's significand; the bits of an integer without its sign, 1 to 15. Sign,
            exponent and significand have at most 16 bits together.
        bias: of a float, by default `2**(exponent_bits - 1) - 1`.
        max_normal: the largest value; by default that of the largest code that is no Inf or NaN. Codes above it are
            never stored but for those.
        has_inf: True if the code above `max_normal` is Inf; by default that is the first of the largest exponent.
        has_nan: True if codes above, and above Inf, are NaN.
        full_range: True for an integer that uses the most negative code too.
        values: of a codebook 2 to 256 different numbers, the value of each code, among them 0; they are rounded to
            float32. A value is stored as the code of the nearest, and a tie goes as between whole numbers that count
            the values in ascending order from 0.

    Returns:
        The new row. A row that is there already with the same numbers is returned as it is.

    Raises:
        MXError: for a name that is taken, and for numbers that no element has.

    Example:
        >>> import torch, pt2mx
        >>> row = pt2mx.register_element("fp8_e4m3_b11", exponent_bits=4, mantissa_bits=3, bias=11)
        >>> row.max_normal, row.emin
        (30.0, -10)
        >>> codebook = pt2mx.register_element("example_codebook", values=[-1, 0, 0.5, 1])
        >>> pt2mx.fake_quantize_mx(torch.tensor([0.2, 0.4, -0.9, 1.0]), "example_codebook{4}(bf16)")
        tensor([ 0.0000,  0.5000, -1.0000,  1.0000])
    """
    if not isinstance(name, str) or not _NEW_NAME.fullmatch(name):
        raise MXError(
            f"name={name!r} must be lower-case letters, digits and '_', and begin with a letter, not with mx, nv or bfp"
        )
    if name not in REGISTERED and (name in _DEFAULT_OF_WIDTH or _canonical_name(name) is not None):
        raise MXError(f"name={name!r} is a spelling of pt2mx's own elements: take another, such as '{name}_own'")
    of_number = exponent_bits, mantissa_bits, bias, max_normal, has_inf, has_nan, full_range
    try:
        values = tuple(values)
    except TypeError:
        raise MXError(f"values={values!r} must be a list of numbers, the value of each code") from None
    if values:
        if of_number != (0, None, None, None, False, False, False):
            raise MXError(f"values={list(values)!r} define a codebook: leave out the arguments of floats and integers")
        element = _codebook(name, values)
    elif mantissa_bits is None:
        raise MXError("give mantissa_bits, of a float or an integer, or values, of a codebook")
    else:
        element = _number(name, exponent_bits, mantissa_bits, bias, max_normal, has_inf, has_nan, full_range)
    if REGISTERED.setdefault(name, element) != element:
        raise MXError(f"{name!r} is registered as {REGISTERED[name]!r}: take another name for {element!r}")
    return ELEMENTS.setdefault(name, element)


def _number(
    name: str,
    exponent_bits: int,
    mantissa_bits: int,
    bias: int | None,
    max_normal: float | None,
    has_inf: bool,
    has_nan: bool,
    full_range: bool,
) -> ElementFormat:
    """Return the float or integer of these numbers; MXError where there is none."""
    check_integer("exponent_bits", exponent_bits, 0, _WIDEST_EXPONENT)
    check_integer("mantissa_bits", mantissa_bits, 0 if exponent_bits else 1, _WIDEST - 1 - exponent_bits)
    if full_range and (exponent_bits or max_normal is not None):
        raise MXError("full_range=True is of integers (exponent_bits=0) without another max_normal: leave one out")
    if not exponent_bits and (bias is not None or has_inf or has_nan):
        raise MXError("bias, has_inf and has_nan are of floats: leave them out, or give exponent_bits from 1 on")
    plain = _float(exponent_bits, mantissa_bits) if exponent_bits else _integer(mantissa_bits + 1, full_range)
    row = replace(plain, name=name, bias=plain.bias if bias is None else bias, has_inf=has_inf, has_nan=has_nan)
    check_integer("bias", row.bias, 1 - _LARGEST_EXPONENT, 1 - _LEAST_EXPONENT)
    m, codes = row.mantissa_bits, 1 << row.bits - 1
    if max_normal is None:
        code = codes - 1 - has_nan if not has_inf else codes - 1 - (1 << m)
        max_normal = ((1 << m) + code % (1 << m)) * 2.0 ** ((code >> m) - row.bias - m)
    if not isinstance(max_normal, (int, float)) or not max_normal > 0 or not _has_exponent(max_normal):
        raise MXError(f"max_normal={max_normal!r} must be a number from 2**{_LEAST_EXPONENT} to 2**{_LARGEST_EXPONENT}")
    row = replace(row, max_normal=float(max_normal), emax=_exponent_of(max_normal))
    is_code = row.emax >= row.emin and math.ldexp(max_normal, m - row.emax).is_integer()
    if not is_code or row.max_code + has_inf + has_nan >= codes or row.emin - m < _LEAST_EXPONENT:
        raise MXError(
            f"max_normal={max_normal!r} is no normal number of {row.exponent_bits} exponent bits, {m} mantissa bits "
            f"and bias {row.bias} that leaves codes for has_inf={has_inf} and has_nan={has_nan}, in steps of "
            f"2**{_LEAST_EXPONENT} or more: choose other numbers"
        )
    return row


def _codebook(name: str, values: Sequence[float]) -> ElementFormat:
    """Return the element with these values; MXError for what is no codebook."""
    try:
        rounded = tuple([struct.unpack("f", struct.pack("f", value))[0] + 0.0 for value in values])
    except (struct.error, OverflowError):
        raise MXError(f"values={list(values)!r} must be numbers that float32 represents") from None
    largest = max(rounded)
    fits = all(v == 0 or _has_exponent(abs(v)) for v in rounded)
    if not 2 <= len(set(rounded)) == len(rounded) <= _MOST_VALUES or 0 not in rounded or not largest > 0 or not fits:
        raise MXError(
            f"values={list(values)!r} must be 2 to {_MOST_VALUES} different numbers, among them 0 and a positive one, "
            f"the others of magnitudes from 2**{_LEAST_EXPONENT} to 2**{_LARGEST_EXPONENT}"
        )
    return ElementFormat(name, 0, 23, 127, _exponent_of(largest), largest, values=rounded)


def _exponent_of(value: float) -> int:
    return math.frexp(value)[1] - 1


def _has_exponent(value: float) -> bool:
    return math.isfinite(value) and _LEAST_EXPONENT <= _exponent_of(value) <= _LARGEST_EXPONENT
