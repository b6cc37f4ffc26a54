"""The format table: every number that an algorithm needs to know of an MX format is a field of a row here.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 5 (element formats) and section 6.3 (conversion).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pt2mx.errors import MXError, nearest


@dataclass(frozen=True)
class ElementFormat:
    """One element format: sign, `exponent_bits`, `mantissa_bits`.

    A value's magnitude is `2**(max(exponent, 1) - bias)` times its significand. `emax` is the exponent of the largest
    normal, `max_normal` its value. An integer element is a fixed-point number with one binade: its magnitude is read
    as a float with one exponent bit and bias 1, and only the sign is stored in another way (two's complement).
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

    @property
    def bits(self) -> int:
        """Bits of one code, sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal; below it values are multiples of `2**(emin - mantissa_bits)`."""
        return 1 - self.bias

    @property
    def max_code(self) -> int:
        """Magnitude code (without sign) of `max_normal`; codes above it are Inf and NaN where the format has them."""
        significand = round(self.max_normal / 2.0**self.emax * 2**self.mantissa_bits)
        return ((self.emax + self.bias - 1) << self.mantissa_bits) + significand

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

_FP32_MANTISSA = (1 << 23) - 1


def _max_normal_mantissa(element: ElementFormat) -> int:
    """The fp32 mantissa field of `max_normal`."""
    return round((element.max_normal / 2.0**element.emax - 1) * 2**23)


#: Scale modes. Each is a threshold on the fp32 mantissa field of a block's amax: the shared exponent is
#: `floor(log2 amax) - emax`, plus one where the mantissa is above the threshold (design: numerics, step 2).
SCALE_MODES: dict[str, Callable[[ElementFormat], int]] = {
    # OCP section 6.3: never rounded up
    "floor": lambda element: _FP32_MANTISSA,
    # up unless amax is a power of two
    "ceil": lambda element: 0,
    # up where amax / max_normal is above a power of two, so that nothing saturates
    "rceil": _max_normal_mantissa,
    # up where amax plus half a unit in the last place of the element reaches the next power of two
    "even": lambda element: _FP32_MANTISSA - (1 << (22 - element.mantissa_bits)),
}

#: Roundings of a value, given in units of its quantum, to an integer.
ROUNDINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "even": torch.round,
}


@dataclass(frozen=True)
class MXSpec:
    """How to quantize a tensor: element format, block, axis, scale mode and rounding.

    Args:
        element: an `ElementFormat` or any spelling that `parse_element` takes (`"fp4_e2m1"`, `"mxfp4"`, ...).
        block_size: values that share one scale, at least 1. A last block may be shorter.
        axis: the dimension along which blocks run; negative counts from the end. Inside the export flow each operator
            sets it to its own reduction dimension.
        scale_mode: how the shared exponent follows from the block's largest magnitude; a key of `SCALE_MODES`.
        rounding: how values are rounded to the element's grid; a key of `ROUNDINGS`.

    Raises:
        MXError: for any other value.
    """

    element: ElementFormat
    block_size: int = 32
    axis: int = -1
    scale_mode: str = "floor"
    rounding: str = "even"

    def __post_init__(self) -> None:
        object.__setattr__(self, "element", parse_element(self.element))
        for field, least in (("block_size", 1), ("axis", None)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
                need = "an integer" if least is None else f"an integer of at least {least}"
                raise MXError(f"{field}={value!r} must be {need}")
        for field, allowed in (("scale_mode", SCALE_MODES), ("rounding", ROUNDINGS)):
            if getattr(self, field) not in list(allowed):
                raise MXError(f"unknown {field} {getattr(self, field)!r}: {nearest(getattr(self, field), allowed)}")

    def replace(self, **changes: object) -> MXSpec:
        """This spec with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    @property
    def effective_bits(self) -> float:
        """Bits a value, the shared 8-bit scale included, for whole blocks."""
        return self.element.bits + 8 / self.block_size

    def __str__(self) -> str:
        modes = [m for m, default in ((self.scale_mode, "floor"), (self.rounding, "even")) if m != default]
        return f"mx{self.element}{{{self.block_size}}}" + (f"({','.join(modes)})" if modes else "")


# A bare width names the format with the finer grid of the two that OCP defines at that width.
_DEFAULT_OF_WIDTH = {"fp8": "fp8_e4m3", "fp6": "fp6_e2m3", "fp4": "fp4_e2m1", "int8": "int8"}
_DTYPE_NAMES = {
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float4_e2m1fn_x2": "fp4_e2m1",
    "int8": "int8",
}
# Compiled here: torch.compile traces a call with a spelling, and cannot trace the compilation of a pattern.
_SPLIT = re.compile(r"e\dm\d")
_SPELLING = re.compile(
    r"(?:mx)?(?P<kind>fp|float|int)(?P<bits>\d)(?:_?(?P<split>e\dm\d)(?:fn|fnu)?|\[(?P<bracketed>e\dm\d)\])?"
)


def parse_element(spelling: object) -> ElementFormat:
    """The element format that `spelling` names.

    Takes an `ElementFormat`; a torch dtype (`torch.float8_e4m3fn`, `torch.float4_e2m1fn_x2`, ...) or its name; a pair
    `(exponent bits, mantissa bits)`; `"fp4_e2m1"`, `"float4_e2m1"`, `"mxfp4_e2m1"`, `"MXFP4[E2M1]"`, `"e2m1"`; or a
    bare width (`"mxfp8"` is E4M3, `"mxfp6"` is E2M3).

    Raises:
        MXError: for anything else, naming the nearest valid spelling.
    """
    if isinstance(spelling, ElementFormat):
        return spelling
    if isinstance(spelling, tuple) and len(spelling) == 2:
        name = next((f.name for f in _TABLE if (f.exponent_bits, f.mantissa_bits) == spelling and not f.is_int), None)
    else:
        name = _canonical_name(str(spelling).strip().lower().removeprefix("torch."))
    if name not in FORMATS:
        spellings = [*FORMATS, *(f"mx{name}" for name in FORMATS), *(f"mx{width}" for width in _DEFAULT_OF_WIDTH)]
        raise MXError(f"unknown MX element format {spelling!r}: {nearest(spelling, spellings)}")
    return FORMATS[name]


def _canonical_name(text: str) -> str | None:
    if text in _DTYPE_NAMES:
        return _DTYPE_NAMES[text]
    if _SPLIT.fullmatch(text):
        return next((f.name for f in _TABLE if f.name.endswith(text)), None)
    match = _SPELLING.fullmatch(text)
    if match is None:
        return None
    width = ("int" if match["kind"] == "int" else "fp") + match["bits"]
    split = match["split"] or match["bracketed"]
    return f"{width}_{split}" if split else _DEFAULT_OF_WIDTH.get(width)


# MXFP8[E4M3]{32}, mxfp4_e2m1{16}, mxint8{64,-2}, fp8_e4m3{32}(rceil)
_SPEC = re.compile(r"(?P<element>[^{(]+?)\s*(?:\{(?P<block>\d+)(?:,(?P<axis>-?\d+))?\})?(?:\((?P<modes>[\w,]*)\))?")
# BFP[8|8]{64,-1}(SN): integer element bits | scale bits, block, axis, (S)ymmetric and the rounding letter
_BFP = re.compile(r"bfp\[(?P<bits>\d+)\|8\](?P<rest>\{.*\}|)(?:\(s(?P<rounding>[a-z])\))?")
_BFP_ROUNDINGS = {"n": "even"}


def parse(spelling: object, **overrides: object) -> MXSpec:
    """The spec that `spelling` names: an element as `parse_element` takes it, optionally with a block size and axis in
    braces and modes in parentheses (`"MXFP8[E4M3]{32}"`, `"mxint8{64,-2}"`, `"mxfp4{32}(rceil)"`), or a block floating
    point shorthand (`"BFP[8|8]{64}(SN)"`).

    `overrides` are `MXSpec` fields that win over the spelling. `str(spec)` parses back to the spec, its axis apart.

    Raises:
        MXError: naming the nearest valid spelling.
    """
    if isinstance(spelling, MXSpec):
        return spelling.replace(**overrides)
    if not isinstance(spelling, str):
        return MXSpec(spelling, **overrides)
    text = spelling.strip().lower()
    fields: dict[str, object] = {}
    if bfp := _BFP.fullmatch(text):
        text = f"int{bfp['bits']}{bfp['rest']}"
        if bfp["rounding"]:
            if bfp["rounding"] not in _BFP_ROUNDINGS:
                raise MXError(
                    f"unknown rounding letter {bfp['rounding'].upper()!r} in {spelling!r}: allowed: "
                    + ", ".join(f"{k.upper()} ({v})" for k, v in _BFP_ROUNDINGS.items())
                )
            fields["rounding"] = _BFP_ROUNDINGS[bfp["rounding"]]
    match = _SPEC.fullmatch(text)
    if match is None:
        raise MXError(f"unknown MX format {spelling!r}: {nearest(spelling, [f'mx{n}{{32}}' for n in FORMATS])}")
    for key, group in (("block_size", "block"), ("axis", "axis")):
        if match[group] is not None:
            fields[key] = int(match[group])
    modes = [mode for mode in (match["modes"] or "").split(",") if mode]
    if len(modes) == 1 and modes[0] in ROUNDINGS and modes[0] not in SCALE_MODES:
        fields["rounding"] = modes[0]
    elif len(modes) <= 2:
        fields.update(zip(("scale_mode", "rounding"), modes, strict=False))
    else:
        raise MXError(f"in {spelling!r}: at most a scale mode and a rounding go into the parentheses, not {modes}")
    try:
        return MXSpec(match["element"], **{**fields, **overrides})
    except MXError as error:
        raise MXError(f"in {spelling!r}: {error}") from None
