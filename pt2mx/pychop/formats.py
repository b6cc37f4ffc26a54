"""pychop's `MXSpec`, a format given by the widths of its fields, and its conversion to `pt2mx.MXSpec`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pt2mx import spec as core
from pt2mx.compat import PRESETS
from pt2mx.errors import MXError, nearest
from pt2mx.formats import ELEMENTS, FORMATS, ElementFormat, parse_element


@dataclass(repr=False)
class MXSpec:
    """pychop's `MXSpec`, the format of an array: elements given by the widths of their fields, and blocks over the
    flattened array. `to_core` converts it to a `pt2mx.MXSpec`, which is another class.

    `exp_bits` is 0 for integers, which have the full range of two's complement; `sig_bits` counts neither the sign nor
    the hidden bit. As in pychop, the name decides on special values: `MXFP8_E4M3` and `MXFP8_E5M2` are the formats of
    the OCP specification. Under another name every code with these widths is a number (E4M3 reaches 480).

    Raises:
        MXError: for widths that no element or no scale has; an element has at most 16 bits, at most 7 of them for the
            exponent.
    """

    name: str
    exp_bits: int
    sig_bits: int
    block_size: int = 32
    scale_exp_bits: int = 8
    scale_sig_bits: int = 0

    def __post_init__(self) -> None:
        self.to_core()

    @property
    def element_bits(self) -> int:
        """The number of bits of an element, including its sign."""
        return 1 + self.exp_bits + self.sig_bits

    @property
    def total_bits_per_block(self) -> int:
        """The number of bits of a whole block, including its scale."""
        return self.element_bits * self.block_size + self.scale_exp_bits + self.scale_sig_bits

    @property
    def compression_vs_fp32(self) -> float:
        """The size of a block with 32 bits per value, divided by the size of this one."""
        return 32 * self.block_size / self.total_bits_per_block

    @property
    def compression_vs_fp16(self) -> float:
        """The size of a block with 16 bits per value, divided by the size of this one."""
        return 16 * self.block_size / self.total_bits_per_block

    def to_core(self) -> core.MXSpec:
        """Return the `pt2mx.MXSpec` that represents the same numbers, by `PRESETS["pychop"]`, for the flattened
        array."""
        fields = ("block_size", "scale_exp_bits", "scale_sig_bits")
        return PRESETS["pychop"].spec(self._element(), **{name: getattr(self, name) for name in fields})

    def _element(self) -> ElementFormat:
        element = parse_element((self.exp_bits, self.sig_bits))
        if self.name.upper() == f"MX{element.name}".upper():
            return element
        return ELEMENTS.get(f"{element.name}_finite", element)

    def __repr__(self) -> str:
        return f"MXSpec(name='{self.name}', E{self.exp_bits}M{self.sig_bits}, block_size={self.block_size})"


def _spec_of(element: ElementFormat) -> MXSpec:
    exp_bits, sig_bits = (0, 7) if element.is_int else (element.exponent_bits, element.mantissa_bits)
    return MXSpec(f"MX{element.name}".upper(), exp_bits, sig_bits)


#: The formats of the OCP specification by pychop's names, in pychop's order: the widest elements first; among equally
#: wide elements the one with more exponent bits first; integers last.
MX_FORMATS: dict[str, MXSpec] = {
    f"mx{e.name}": _spec_of(e) for e in sorted(FORMATS.values(), key=lambda e: (e.is_int, -e.bits, -e.exponent_bits))
}


def create_mx_spec(
    exp_bits: int, sig_bits: int, block_size: int = 32, scale_exp_bits: int = 8, name: str | None = None
) -> MXSpec:
    """Return a custom format, as `pychop.create_mx_spec` does; its default name is made from the widths.

    Raises:
        MXError: as `MXSpec`.
    """
    parse_element((exp_bits, sig_bits))
    if name is None:
        name = f"CUSTOM_MX{1 + exp_bits + sig_bits}_E{exp_bits}M{sig_bits}"
    return MXSpec(name, exp_bits, sig_bits, block_size, scale_exp_bits)


def resolve(
    format: object, block_size: int = 32, scale_exp_bits: int | None = None, scale_sig_bits: int | None = None
) -> MXSpec:
    """Return the format that pychop's functions mean: a key of `MX_FORMATS` or a pair (exponent bits, significand bits)
    in blocks of `block_size`, or an `MXSpec` in its own. Passed widths of the scale replace the widths of the format.

    Raises:
        MXError: for another format.
    """
    if isinstance(format, MXSpec):
        spec = format
    elif isinstance(format, str):
        if format.lower() not in MX_FORMATS:
            raise MXError(f"unknown format {format!r}: {nearest(format, MX_FORMATS)}")
        spec = replace(MX_FORMATS[format.lower()], block_size=block_size)
    elif isinstance(format, tuple) and len(format) == 2:
        spec = create_mx_spec(*format, block_size)
    else:
        raise MXError(f"format={format!r} must be a key of MX_FORMATS, an MXSpec or a pair (exp_bits, sig_bits)")
    scale: dict[str, Any] = {"scale_exp_bits": scale_exp_bits, "scale_sig_bits": scale_sig_bits}
    return replace(spec, **{name: bits for name, bits in scale.items() if bits is not None})
