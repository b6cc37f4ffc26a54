"""`MXSpec`, how to quantize a tensor, and the texts of specs: the spellings that the field uses, and the one that
`str(spec)` gives."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pt2mx.errors import MXError, check_integer, nearest
from pt2mx.formats import FORMATS, NV_SPELLINGS, REGISTERED, ElementFormat, is_element, parse_element
from pt2mx.modes import FLOAT_SCALE_MODES, ROUNDINGS, SCALE_MODES, check_scale_mode, scale_modes
from pt2mx.scale_formats import SCALE_FORMATS, ScaleFormat, is_scale_format, parse_scale_format

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

#: the block size of blocks as long as the row
ROW = 2**63 - 1
#: prefix of an element -> the scale format that it says, and the block size where none is named
_PREFIXES = {"mx": ("e8m0", 32), "nv": ("e4m3_f32", 16)}
_PREFIX_OF = {scale_format: prefix for prefix, (scale_format, _) in _PREFIXES.items()}

# MXFP8[E4M3]{32}, mxint8{64,-2}, fp8_e4m3{128x128}(f32), int4{row}(bf16), mxfp4{32}(ceil,up,e5m0)
_SPEC = re.compile(
    rf"(?P<prefix>{'|'.join(_PREFIXES)})?(?!mx|nv)(?P<element>[^{{(]+?)\s*"
    r"(?:\{(?:(?P<rows>\d{1,19})x)?(?P<block>\d{1,19}|row)(?:,(?P<axis>-?\d{1,19}))?\})?"
    r"(?:\((?P<modes>\w+(?:,\w+)*)?\))?",
    re.ASCII,
)
# BFP[8|8]{64,-1}(SN): integer element bits | scale bits, block, axis, (S)ymmetric or _, and the rounding letter
_BFP = re.compile(
    r"bfp\[(?P<bits>\d{1,3})\|(?P<scale>\d{1,3})\](?P<rest>\{.*\}|)(?:\((?P<symmetry>[s_])(?P<rounding>[a-z])\))?",
    re.ASCII,
)
# BFP16, BFP12_64, BFP16A_64: bits of an element and of the exponent, `A` for the full range, and the block
_BFP_NAME = re.compile(
    r"bfp(?P<bits>\d\d)(?P<full>a?)(?:_(?P<block>\d{1,19}))?(?P<rest>(?:\{.*\})?(?:\(.*\))?)", re.ASCII
)
#: d-Matrix's block sizes of the names that come without one
_BFP_BLOCKS = {"16": 64, "12": 128}
_BFP_ROUNDINGS = {"n": "even", "s": "stochastic", "u": "up", "d": "down"}
_SCALE = re.compile(r"e(\d{1,3})m(\d{1,3})", re.ASCII)


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
        for field, allowed in _INTEGERS.items():
            check_integer(field, getattr(self, field), *allowed)
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

    def without_tensor_scale(self) -> MXSpec:
        """Return this spec with the same scales of blocks, and none of the tensor.

        Returns:
            The new spec; this one, if it has no tensor scale.

        Example:
            >>> import pt2mx
            >>> print(pt2mx.parse("nvfp4").without_tensor_scale())
            fp4_e2m1{16}(e4m3)
        """
        if not self.has_tensor_scale:
            return self
        stored = self.scale_format.grid, self.scale_format.dtype
        alike = [scale for scale in SCALE_FORMATS.values() if (scale.grid, scale.dtype) == stored and not scale.tensor]
        return self.replace(scale_format=alike[0])

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

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor.

        Args:
            shape: of the tensor.

        Returns:
            The blocks along `axis` and, in blocks of several rows, along `row_axis`; elsewhere the sizes of `shape`.

        Raises:
            MXError: as `row_axis`.

        Example:
            >>> import pt2mx
            >>> pt2mx.parse("mxfp4").scale_shape((3, 70)), pt2mx.parse("fp8{128x128}(f32)").scale_shape((300, 512))
            ((3, 3), (3, 4))
        """
        blocks = list(shape)
        blocks[self.axis] = -(-blocks[self.axis] // self.block_size)
        if self.block_rows > 1:
            rows = self.row_axis(len(blocks))
            blocks[rows] = -(-blocks[rows] // self.block_rows)
        return tuple(blocks)

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
    def blocks(self) -> str:
        """The size of a block as texts spell it: `32`, `128x128`, `row`."""
        size = "row" if self.block_size == ROW else str(self.block_size)
        return size if self.block_rows == 1 else f"{self.block_rows}x{size}"

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
    def is_registered(self) -> bool:
        """True if this process registered the element (`register_element`) or the scale mode
        (`register_scale_mode`)."""
        mode = SCALE_MODES.get(self.scale_mode)  # a registered mode is one of every scale format
        return self.element.name in REGISTERED or (mode is not None and mode.function is not None)

    @property
    def has_kernels(self) -> bool:
        """True if other kernels than the reference support the element and the scale mode."""
        return not (self.element.is_wide or self.is_registered)

    def check_built_in(self, where: str) -> None:
        """Refuse a registered element or scale mode.

        Args:
            where: what does not hold it, for the message.

        Raises:
            MXError: for one.
        """
        if self.is_registered:
            raise MXError(
                f"{self}: {where} name pt2mx's own elements and scale modes alone, and this process registered one: "
                "quantize with others"
            )

    @property
    def has_power_of_two_scale(self) -> bool:
        """True for scales without a significand."""
        return self.scale_format.is_power_of_two

    @property
    def has_tensor_scale(self) -> bool:
        """True if the whole tensor has a scale too, in float32."""
        return bool(self.scale_format.tensor)

    @property
    def divides_by_tensor_scale(self) -> bool:
        """True if the whole tensor has a scale by which values are divided, not multiplied."""
        return self.scale_format.tensor == "divisor"

    @property
    def multiplies_by_reciprocal(self) -> bool:
        """True if values are multiplied by the reciprocal of their scale, not divided by it."""
        return not self.has_power_of_two_scale and FLOAT_SCALE_MODES[self.scale_mode].reciprocal

    @property
    def searches(self) -> bool:
        """True if the errors of a block decide its scale, False if its largest value alone does."""
        if self.has_power_of_two_scale:
            return SCALE_MODES[self.scale_mode].searches
        mode = FLOAT_SCALE_MODES[self.scale_mode]
        return len(mode.factors(self.element)) * len(mode.code_offsets) > 1

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of stored scales: uint8, or a float."""
        return self.scale_format.dtype

    @property
    def scale_bits(self) -> int:
        """The bits of a block's scale."""
        scale = self.scale_format
        return self.scale_exp_bits + self.scale_sig_bits if scale.is_power_of_two else scale.bits

    @property
    def scale_widths(self) -> tuple[int, int]:
        """The bits of a scale's exponent, and of its significand."""
        grid = self.scale_format.grid
        is_float = not self.has_power_of_two_scale
        return (grid.exponent_bits, grid.mantissa_bits) if is_float else (self.scale_exp_bits, self.scale_sig_bits)

    @property
    def significant_bits(self) -> int:
        """The most significant bits of an element's value times its block's scale, the leading ones included."""
        of_scale = 0 if self.has_power_of_two_scale else self.scale_format.grid.mantissa_bits + 1
        return self.element.mantissa_bits + 1 + of_scale

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


#: field -> its least and largest value, where they are not those of int64
_INTEGERS = {"block_size": (1,), "block_rows": (1,), "axis": (), "scale_exp_bits": (1, 11), "scale_sig_bits": (0, 23)}


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


def text_of(spec: MXSpec) -> str:
    """Return the text of a spec, without its axis; `fields_of_text` reads it."""
    defaults = ((spec.scale_mode, spec.scale_format.scale_mode), (spec.rounding, "even"))
    words = [m for m, default in defaults if m != default]
    if words == ["even"]:  # the scale mode of that name
        words = ["even", "even"]
    prefix = _PREFIX_OF.get(spec.scale_format.name, "")
    if not prefix:
        words.append(spec.scale_format.name)
    elif spec.scale_bits != spec.scale_format.bits or spec.scale_sig_bits:
        words.append(f"e{spec.scale_exp_bits}m{spec.scale_sig_bits}")
    return f"{prefix}{spec.element}{{{spec.blocks}}}" + (f"({','.join(words)})" if words else "")


def fields_of_text(spelling: str) -> tuple[str, dict[str, Any]]:
    """Return the element and the fields of `MXSpec` that a text names (`pt2mx.parse`); MXError for another text."""
    text, fields = _as_integer(spelling)
    match = _SPEC.fullmatch(text)
    if match is None:
        raise MXError(f"unknown MX format {spelling!r}: {nearest(spelling, [f'mx{n}{{32}}' for n in FORMATS])}")
    if prefix := match["prefix"]:
        fields["scale_format"], fields["block_size"] = _PREFIXES[prefix]
    for key, group in (("block_rows", "rows"), ("block_size", "block"), ("axis", "axis")):
        if match[group] is not None:
            fields[key] = ROW if match[group] == "row" else int(match[group])
    try:
        fields.update(_modes([word for word in (match["modes"] or "").split(",") if word], prefix))
    except MXError as error:
        raise MXError(f"in {spelling!r}: {error}") from None
    if prefix == "nv" and not is_element(match["element"]):
        raise MXError(f"unknown element format in {spelling!r}: {nearest(text, NV_SPELLINGS)}")
    # `parse_element` takes `mx` too, and its errors then name what was written
    return ("mx" if prefix == "mx" else "") + match["element"], fields


def _as_integer(spelling: str) -> tuple[str, dict[str, Any]]:
    """Return a spelling in lower case, with an integer format in place of a shorthand of block floating point, and the
    fields of `MXSpec` that the shorthand names."""
    text = spelling.strip().lower()
    if named := _BFP_NAME.fullmatch(text):
        block = named["block"] or ("" if "{" in named["rest"] else _BFP_BLOCKS.get(named["bits"], ""))
        full = "_full" if named["full"] else ""
        return f"int{int(named['bits']) - 8}{full}" + (f"{{{block}}}" if block else "") + named["rest"], {}
    bfp = _BFP.fullmatch(text)
    if bfp is None:
        return text, {}
    fields: dict[str, Any] = {"scale_exp_bits": int(bfp["scale"])}
    if bfp["rounding"]:
        if bfp["rounding"] not in _BFP_ROUNDINGS:
            raise MXError(
                f"unknown rounding letter {bfp['rounding'].upper()!r} in {spelling!r}: allowed: "
                + ", ".join(f"{k.upper()} ({v})" for k, v in _BFP_ROUNDINGS.items())
            )
        fields["rounding"] = _BFP_ROUNDINGS[bfp["rounding"]]
    full = "_full" if bfp["symmetry"] == "_" else ""
    return f"int{bfp['bits']}{full}{bfp['rest']}", fields


def _modes(words: list[str], prefix: str | None) -> dict[str, Any]:
    """Return the fields that the words in parentheses name: a scale mode, a rounding, and the scale format or the
    widths of an E8M0 scale. Behind the prefix `mx` E4M3 and E5M3 are such widths."""
    fields: dict[str, Any] = {}
    last = words[-1] if words else ""
    if not prefix and is_scale_format(last):
        fields["scale_format"] = parse_scale_format(last)
        words = words[:-1]
    elif prefix != "nv" and (scale := _SCALE.fullmatch(last)):
        fields["scale_exp_bits"], fields["scale_sig_bits"] = int(scale[1]), int(scale[2])
        words = words[:-1]
    elif prefix and is_scale_format(last):
        raise MXError(f"the prefix {prefix!r} says {_PREFIXES[prefix][0]} scales: leave it out for {last} scales")
    modes = scale_modes(fields.get("scale_format") or SCALE_FORMATS[_PREFIXES[prefix or "mx"][0]])
    if len(words) == 1 and words[0] in ROUNDINGS and words[0] not in modes:
        return {**fields, "rounding": words[0]}
    if len(words) > 2:
        raise MXError(f"at most a scale mode, a rounding and a scale format go into the parentheses, not {words}")
    if last and not prefix and not fields and last not in {*modes, *ROUNDINGS}:
        known = [*modes, *ROUNDINGS, *SCALE_FORMATS]
        raise MXError(f"unknown mode or scale format {last!r}: {nearest(last, known)}")
    return {**fields, **dict(zip(("scale_mode", "rounding"), words, strict=False))}
