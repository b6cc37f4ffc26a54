"""`MXSpec`, how to quantize a tensor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pt2mx.errors import MXError, nearest
from pt2mx.formats import ElementFormat, parse_element
from pt2mx.modes import ROUNDINGS, check_scale_mode, scale_modes
from pt2mx.scale_formats import ScaleFormat, parse_scale_format
from pt2mx.spec_text import ROW, fields_of_text, text_of


@dataclass(frozen=True)
class MXSpec:
    """The quantization of a tensor: element format, block, axis, scale mode, rounding and scale format.

    Args:
        element: an `ElementFormat` or any spelling that `parse_element` takes (`"fp4_e2m1"`, `"mxfp4"`, ...).
        block_size: values along the axis that share one scale, at least 1. A last block may be shorter.
        axis: the dimension along which blocks run; negative counts from the end. Inside the export flow each operator
            sets it to its own reduction dimension.
        scale_mode: how the scale follows from the block's values: a key of `SCALE_MODES` for scales that are powers of
            two, of `FLOAT_SCALE_MODES` for others; None: the default of the scale format.
        rounding: how values are rounded to the element's grid; a key of `ROUNDINGS`.
        scale_exp_bits: width of the shared exponent, 1 to 11; it is clamped to +-(2**(scale_exp_bits - 1) - 1).
        scale_sig_bits: bits of a significand, 0 to 23; as in pychop they are counted, and scales stay powers of two.
        scale_format: the format of scales; a `ScaleFormat` or any spelling that `parse_scale_format` takes.
        block_rows: rows that share one scale, at least 1: a block has `block_rows * block_size` values. Rows are
            counted along `row_axis`.

    Other widths of the exponent than 8 work in eager calls of `fake_quantize_mx` only. Operators that name no scale
    format take E8M0 scales of one row.

    Raises:
        MXError: for any other value.

    Example:
        >>> import pt2mx
        >>> spec = pt2mx.MXSpec("fp4_e2m1", block_size=16, rounding="stochastic")
        >>> print(spec)
        mxfp4_e2m1{16}(stochastic)
    """

    element: ElementFormat
    block_size: int = 32
    axis: int = -1
    scale_mode: str = None  # type: ignore[assignment]  # `__post_init__` puts the default of the scale format here
    rounding: str = "even"
    scale_exp_bits: int = 8
    scale_sig_bits: int = 0
    scale_format: ScaleFormat = "e8m0"  # type: ignore[assignment]  # a name: torch.compile cannot trace another default
    block_rows: int = 1

    if TYPE_CHECKING:  # formats are given in any spelling, and read as what they name

        def __init__(
            self,
            element: object,
            block_size: int = 32,
            axis: int = -1,
            scale_mode: str | None = None,
            rounding: str = "even",
            scale_exp_bits: int = 8,
            scale_sig_bits: int = 0,
            scale_format: object = "e8m0",
            block_rows: int = 1,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "element", parse_element(self.element))
        object.__setattr__(self, "scale_format", parse_scale_format(self.scale_format))
        if self.scale_mode is None:
            object.__setattr__(self, "scale_mode", self.scale_format.scale_mode)
        for field, (least, most, described) in _INTEGERS.items():
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise MXError(f"{field}={value!r} must be an integer{described}")
        check_scale_mode(self.scale_mode, self.scale_format, self.element)
        if not isinstance(self.rounding, str) or self.rounding not in ROUNDINGS:
            raise MXError(f"unknown rounding {self.rounding!r}: {nearest(self.rounding, ROUNDINGS)}")
        if not self.scale_format.is_power_of_two and (self.scale_exp_bits, self.scale_sig_bits) != (8, 0):
            widths = f"scale_exp_bits={self.scale_exp_bits} and scale_sig_bits={self.scale_sig_bits}"
            raise MXError(f"{widths} are widths of e8m0 scales: {self.scale_format} has its own")

    def replace(self, **changes: Any) -> MXSpec:
        """Return this spec with some fields changed, checked again.

        Args:
            changes: fields of `MXSpec` by name.

        Returns:
            The new spec.

        Raises:
            MXError: for a value that `MXSpec` does not take.

        Example:
            >>> import pt2mx
            >>> print(pt2mx.parse("mxfp8").replace(block_size=64, scale_mode="rceil"))
            mxfp8_e4m3{64}(rceil)
        """
        if "scale_format" in changes and "scale_mode" not in changes:
            modes = scale_modes(parse_scale_format(changes["scale_format"]))
            changes["scale_mode"] = self.scale_mode if self.scale_mode in modes else None
        return dataclasses.replace(self, **changes) if changes else self

    def row_axis(self, rank: int) -> int:
        """Return the dimension along which the rows of a block are counted, from the front: the other of the last two
        dimensions, where `axis` is one of these, and else the dimension before `axis`.

        Args:
            rank: dimensions of the tensor.

        Returns:
            The dimension.

        Raises:
            MXError: for a tensor without such a dimension.

        Example:
            >>> import pt2mx
            >>> weight = pt2mx.parse("mxfp8{128x128}")
            >>> weight.row_axis(2), weight.replace(axis=-2).row_axis(2), weight.replace(axis=1).row_axis(4)
            (0, 1, 0)
        """
        axis = self.axis % max(rank, 1)
        rows = rank - 1 if axis == rank - 2 else axis - 1
        if rows < 0:
            raise MXError(
                f"{self}: blocks of {self.block_rows} rows along axis={self.axis} need a second dimension, which a "
                f"tensor of rank {rank} does not have there: pass another axis, or block_rows=1"
            )
        return rows

    def check_plain_scale(self) -> None:
        """Refuse a spec where only E8M0 scales of one row are taken.

        Raises:
            MXError: for other scales.
        """
        if not self.has_plain_scale:
            raise MXError(
                f"{self}: this takes E8M0 scales (scale_exp_bits=8, scale_sig_bits=0) of one row only; quantize_mx, "
                "dequantize_mx, fake_quantize_mx and weights of linear layers take other scale formats and block_rows"
            )

    def check_operators(self) -> None:
        """Refuse a spec that no operator `torch.ops.pt2mx.*` takes.

        Raises:
            MXError: for E8M0 scales of other widths than 8 bits of exponent.
        """
        if not self.has_operators:
            raise MXError(
                f"{self}: only eager calls of fake_quantize_mx take E8M0 scales of other widths than scale_exp_bits=8 "
                "and scale_sig_bits=0"
            )

    @property
    def has_e8m0_scale(self) -> bool:
        """True if scales are the E8M0 bytes of the OCP specification (OCP MX v1.0, section 5.4.1)."""
        return (self.scale_format.name, self.scale_exp_bits, self.scale_sig_bits) == ("e8m0", 8, 0)

    @property
    def has_plain_scale(self) -> bool:
        """True for E8M0 scales of one row, which all operators `torch.ops.pt2mx.*` support."""
        return self.has_e8m0_scale and self.block_rows == 1

    @property
    def has_operators(self) -> bool:
        """True if the operators with a scale format support this spec."""
        return (self.scale_exp_bits, self.scale_sig_bits) == (8, 0)

    @property
    def scale_bits(self) -> int:
        """The bits of a block's scale."""
        scale = self.scale_format
        return self.scale_exp_bits + self.scale_sig_bits if scale.is_power_of_two else scale.bits

    @property
    def effective_bits(self) -> float:
        """The bits of a value, with its share of the scale, in whole blocks."""
        return self.element.bits + self.scale_bits / (self.block_rows * self.block_size)

    def __hash__(self) -> int:
        # each call of an operator hashes specs: the fields of the formats would take longer than their names
        names = self.element.name, self.scale_mode, self.rounding, self.scale_format.name
        return hash((*names, self.block_size, self.axis, self.block_rows))

    def __str__(self) -> str:
        return text_of(self)


_INTEGERS = {
    "block_size": (1, ROW, " of at least 1"),
    "block_rows": (1, ROW, " of at least 1"),
    "axis": (-(2**63), 2**63 - 1, ""),
    "scale_exp_bits": (1, 11, ", 1 to 11"),
    "scale_sig_bits": (0, 23, ", 0 to 23"),
}


def create_mx_spec(exp_bits: int, sig_bits: int, block_size: int = 32, **fields: Any) -> MXSpec:
    """Return the spec of a custom element, as pychop's function of this name does.

    An element of more than 8 bits takes two bytes per code, and only the reference kernel supports it.

    Args:
        exp_bits: exponent bits, 1 to 7, or 0 for an integer.
        sig_bits: stored significand bits; sign, exponent and significand have at most 16 bits together. `(4, 3)` and
            `(5, 2)` are the OCP formats of that split.
        block_size: values that share one scale.
        fields: further fields of `MXSpec`.

    Returns:
        The spec.

    Raises:
        MXError: if no element has that split, and for a field that `MXSpec` does not take.

    Example:
        >>> import pt2mx
        >>> print(pt2mx.create_mx_spec(3, 4, block_size=16))
        mxfp8_e3m4{16}
    """
    return MXSpec((exp_bits, sig_bits), block_size, **fields)


def parse(spelling: object, **overrides: Any) -> MXSpec:
    """Return the spec that a spelling names. `str(spec)` parses back to the spec, its axis apart.

    The prefix `mx` says E8M0 scales, and `nv` E4M3 scales with a float32 scale a tensor, in blocks of 16. Without a
    prefix the last word in parentheses may be a scale format; by default it is E8M0.

    Args:
        spelling: an `MXSpec`; what `parse_element` takes; an element with a block size and axis in braces and modes in
            parentheses (`"MXFP8[E4M3]{32}"`, `"mxint8{64,-2}"`, `"mxfp4{32}(rceil,half_away)"`, `"nvfp4"`,
            `"fp8_e4m3{128x128}(f32)"`, `"fp8_e4m3{row}(f32)"`, `"int4{128}(bf16)"`); a block floating point shorthand
            (`"BFP[8|8]{64}(SN)"`: element bits, scale bits, block, symmetric or `_`, and the rounding N, S, U or D:
            nearest, stochastic, up or down); or d-Matrix's name of one: `"BFP16_64"` is `BFP[8|8]{64}`, since 16 counts
            the exponent too (pychop's bfp16 does not count it), `"BFP16A_64"` has the full range of two's complement,
            `"BFP16"` has blocks of 64 and `"BFP12"` of 128.
        overrides: fields of `MXSpec`, which win over the spelling.

    Returns:
        The spec. Fields that neither names have the defaults of `MXSpec`.

    Raises:
        MXError: for another spelling, naming the nearest valid one, and for a field that `MXSpec` does not take.

    Example:
        >>> import pt2mx
        >>> spec = pt2mx.parse("MXFP4[E2M1]{16}(rceil)", axis=0)
        >>> spec.element.name, spec.block_size, spec.axis, spec.scale_mode
        ('fp4_e2m1', 16, 0, 'rceil')
        >>> print(pt2mx.parse("BFP16_64"))
        mxint8{64}
    """
    if isinstance(spelling, MXSpec):
        return spelling.replace(**overrides)
    if not isinstance(spelling, str):
        return MXSpec(spelling, **overrides)
    element, fields = fields_of_text(spelling)
    try:
        return MXSpec(element, **{**fields, **overrides})
    except MXError as error:
        raise MXError(f"in {spelling!r}: {error}") from None
