"""`Claim`: the conventions of an implementation, and those among them that the specification leaves open.

The order of codes in bytes is one of them (PACKINGS): the layout of a block in memory is open (section 5.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mx_conformance.errors import MXError, nearest
from mx_conformance.exact import ROUNDINGS
from mx_conformance.formats import ELEMENTS, FORMATS, ElementFormat, parse_element

Bytes = NDArray[np.uint8]


class Packing(NamedTuple):
    """`pack` takes (codes (rows, n) uint8, bits of a code) and returns (rows, bytes) uint8; `unpack` is the inverse.

    `widths` are the bits of the codes that it packs; n fills whole bytes.
    """

    pack: Callable[[Bytes, int], Bytes]
    unpack: Callable[[Bytes, int], Bytes]
    widths: tuple[int, ...]


def _stream(order: Literal["little", "big"], widths: tuple[int, ...]) -> Packing:
    """Return the packing of codes as one stream of bits, which fills bytes from the low or the high bit."""

    def pack(codes: Bytes, bits: int) -> Bytes:
        each = np.unpackbits(codes[..., None], axis=-1, bitorder=order)
        each = each[..., :bits] if order == "little" else each[..., 8 - bits :]
        return np.packbits(each.reshape(len(codes), -1), axis=-1, bitorder=order)

    def unpack(data: Bytes, bits: int) -> Bytes:
        stream = np.unpackbits(data, axis=-1, bitorder=order)
        each = stream[:, : stream.shape[1] // bits * bits].reshape(len(data), -1, bits)
        padding = [(0, 0), (0, 0), (0, 8 - bits) if order == "little" else (8 - bits, 0)]
        return np.packbits(np.pad(each, padding), axis=-1, bitorder=order)[..., 0]

    return Packing(pack, unpack, widths)


def _pack_halves(codes: Bytes, bits: int) -> Bytes:
    first, second = np.split(codes.reshape(len(codes), -1, 32), 2, axis=-1)
    return (first | second << np.uint8(4)).reshape(len(codes), -1)


def _unpack_halves(data: Bytes, bits: int) -> Bytes:
    each = data.reshape(len(data), -1, 16)
    return np.concatenate([each & 15, each >> 4], axis=-1).reshape(len(data), -1)


#: name -> the packing
PACKINGS: dict[str, Packing] = {
    # the first code in the low bits
    "low_first": _stream("little", (4, 6, 8)),
    # the first code in the high bits
    "high_first": _stream("big", (4, 6)),
    # of a block of 32 the first 16 codes in the low nibbles, the others in the high nibbles: GGUF
    "halves": Packing(_pack_halves, _unpack_halves, (4,)),
    # a byte for each code
    "bytes": Packing(lambda codes, bits: codes, lambda data, bits: data, (4, 6)),
}


def packings(element: ElementFormat) -> tuple[str, ...]:
    """Return the names of the packings of an element's codes."""
    return tuple(name for name, packing in PACKINGS.items() if element.bits in packing.widths)


@dataclass(frozen=True)
class Claim:
    """One format, and what an implementation says of its conventions. None leaves a convention to detection.

    Args:
        element: one of the six elements of the specification.
        scale_mode: the rule of the shared exponent, such as "floor", "ceil", "rceil", "even" or "mse".
        rounding: a key of `ROUNDINGS`.
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


def _scale_rules(element: ElementFormat) -> tuple[str, ...]:
    """Return the rules by which a scale follows from amax alone; "mse", which compares errors, must be claimed."""
    of_fp4 = ("rceil_v2",) if element.name == "fp4_e2m1" else ()
    of_others = (f"even_m{bits}" for bits in EVEN_OF if bits != element.mantissa_bits)
    return ("floor", "ceil", "rceil", *of_fp4, "even", "doubled", *of_others)


#: what stands for a scale rule where none fits
NONE_OF_THESE = "none of these"

#: field of `Claim` -> the convention
CHOICES: dict[str, Choice] = {
    "packing": Choice("low_first", packings, lambda value: f"codes packed {value}"),
    "scale_mode": Choice("floor", _scale_rules, lambda value: f"scale rule {value}"),
    "rounding": Choice(
        "even",
        lambda element: tuple(ROUNDINGS),
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
            allowed += ("mse",)
        if value is not None and (value not in allowed or isinstance(value, int) != isinstance(allowed[0], bool)):
            raise MXError(f"{name}={value!r} of {element}: {nearest(value, map(str, allowed))}, or None to detect it")
    return Claim(element, **conventions)
