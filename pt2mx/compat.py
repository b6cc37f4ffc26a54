"""The conventions of other libraries by name, where they differ from pt2mx's defaults.

A preset reproduces what a library states: its scale mode, rounding, integer range, axis and the way it stores codes and
scales. Where a library is wrong by the specification, the preset gives the specified value, and `not_copied` says so.

    scale, data = PRESETS["torchmx"].quantize(x, "mxfp4")  # the bytes that TorchMX stores
    y = PRESETS["torchmx"].fake_quantize(x, "mxint8")
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.formats import ELEMENTS, ElementFormat
from pt2mx.functional import dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.kernels.packing import is_packed, pack, unpack
from pt2mx.kernels.reference import NAN_SCALE
from pt2mx.ops.checks import check_spec, check_tensors
from pt2mx.spec import MXSpec, parse

#: pt2mx's defaults
_PLAIN = MXSpec("int8")


@dataclass(frozen=True)
class Preset:
    """One library's conventions; the defaults are pt2mx's own.

    Args:
        name, version: the library.
        rounding, scale_mode, axis, block_size: its defaults; `axis=None` is one row of all values in order.
        rounding_of: another rounding for some elements, by name.
        rounding_modes: the roundings that `rounding_mode=0, 1, ...` names in `spec`; they are those of integers.
        full_range: whether its integers reach the most negative code.
        int_scale_offset: what its scale bytes of 8-bit integers differ by: codes are whole numbers.
        high_nibble_first: the order of two 4-bit codes in a byte.
        packed_widths: widths of codes that share bytes.
        flush_subnormal_blocks: blocks whose largest magnitude is an fp32 subnormal become zero.
        overflow_to_nan: blocks whose shared exponent is above what the scale holds become NaN (`scale_exp_bits` below
            8; scale mode floor).
        reason: why the row differs from the defaults.
        not_copied: faults by the specification that the preset leaves out.
    """

    name: str
    version: str
    reason: str
    not_copied: str
    scale_mode: str = "floor"
    rounding: str = "even"
    rounding_of: tuple[tuple[str, str], ...] = ()
    rounding_modes: tuple[str, ...] = ()
    axis: int | None = -1
    block_size: int = 32
    full_range: bool = False
    int_scale_offset: int = 0
    high_nibble_first: bool = False
    packed_widths: tuple[int, ...] = (4, 6)
    flush_subnormal_blocks: bool = False
    overflow_to_nan: bool = False

    def spec(self, elem_dtype: object, rounding_mode: int | None = None, **fields: object) -> MXSpec:
        """The library's spec of an element, as `pt2mx.parse` takes it.

        What its spelling says beyond pt2mx's defaults wins over the preset, and `fields` of `MXSpec` over both. An axis
        of None is -1 of the flattened tensor. `rounding_mode` is the library's number of a rounding.

        Raises:
            MXError: for a number that the library does not have.
        """
        spelled = parse(elem_dtype)
        element = spelled.element
        if self.full_range and element.is_int and not element.full_range:
            element = ELEMENTS[f"{element.name}_full"]
        preset = {
            "block_size": self.block_size,
            "axis": -1 if self.axis is None else self.axis,
            "scale_mode": self.scale_mode,
            "rounding": self._rounding(element, rounding_mode),
        }
        said = {name: value for name, value in vars(spelled).items() if value != getattr(_PLAIN, name)}
        return MXSpec(**{**preset, **said, **fields, "element": element})

    def fake_quantize(self, x: Tensor, elem_dtype: object, **fields: object) -> Tensor:
        """x: (..., n, ...) float32, float16 or bfloat16 -> the values that the library gives, same shape and dtype."""
        rows, spec = self._rows(x, elem_dtype, fields)
        return fake_quantize_mx(rows, spec).reshape(x.shape)

    def quantize(self, x: Tensor, elem_dtype: object, **fields: object) -> tuple[Tensor, Tensor]:
        """x: (..., n, ...) -> scale (..., blocks, ...) uint8 and data (..., bytes, ...) uint8 as the library stores
        them.

        Raises:
            MXError: where the library's scale byte cannot say the exponent (TorchMX's int8 below 2**-121).
        """
        rows, spec = self._rows(x, elem_dtype, fields)
        length = torch.atleast_1d(rows).shape[spec.axis]
        return self.to_storage(*quantize_mx(rows, spec), spec, length)

    def dequantize(
        self,
        data: Tensor,
        scale: Tensor,
        elem_dtype: object,
        target_dtype: torch.dtype = torch.float32,
        length: int | None = None,
        **fields: object,
    ) -> Tensor:
        """data, scale: as the library stores them -> (..., length, ...) `target_dtype`; where it stores a code a byte,
        length is the number of bytes."""
        check_tensors(data=data, scale=scale)
        spec = self.spec(elem_dtype, **fields)
        if not self._shares_bytes(spec) and data.dim():
            length = data.shape[spec.axis]
        scale, data = self.from_storage(scale, data, spec)
        return dequantize_mx(data, scale, spec, target_dtype=target_dtype, length=length)

    def to_storage(self, scale: Tensor, data: Tensor, spec: MXSpec, length: int) -> tuple[Tensor, Tensor]:
        """What `quantize_mx` gives of `length` values along the axis, in the library's bytes."""
        if self._shifts_scale(spec):
            shifted = scale.to(torch.int16) + self.int_scale_offset
            axis = spec.axis % data.dim()
            used = torch.cat([part.any(axis, keepdim=True) for part in data.split(spec.block_size, axis)], axis)
            if bool(((shifted < 0) & used).any()):
                raise MXError(
                    f"a block's exponent is below what {self.name} stores for {spec.element} "
                    f"({-127 - self.int_scale_offset}): scale the tensor up first"
                )
            scale = torch.where(scale == NAN_SCALE, scale, shifted.clamp(min=0).to(torch.uint8))
        if self._shares_bytes(spec):
            return scale, self._nibbles(data, spec)
        axis = spec.axis % data.dim()
        return scale, unpack(data, axis, spec.element.bits).narrow(axis, 0, length).to(torch.uint8)

    def from_storage(self, scale: Tensor, data: Tensor, spec: MXSpec) -> tuple[Tensor, Tensor]:
        """The library's bytes as `dequantize_mx` takes them."""
        if self._shifts_scale(spec):
            shifted = (scale.to(torch.int16) - self.int_scale_offset).clamp(max=NAN_SCALE - 1).to(torch.uint8)
            scale = torch.where(scale == NAN_SCALE, scale, shifted)
        if self._shares_bytes(spec):
            return scale, self._nibbles(data, spec)
        return scale, pack(data.to(torch.int32), spec.axis % data.dim(), spec.element.bits)

    def _rows(self, x: Tensor, elem_dtype: object, fields: dict[str, object]) -> tuple[Tensor, MXSpec]:
        check_tensors(x=x)
        spec = self.spec(elem_dtype, **fields)
        flat = self.axis is None and "axis" not in fields and parse(elem_dtype).axis == _PLAIN.axis
        rows = x.reshape(-1) if flat else x
        if self.flush_subnormal_blocks:
            rows = _fill_blocks(rows, spec, lambda amax: amax < 2.0**-126, 0.0)
        beyond = 2 ** (spec.scale_exp_bits - 1) + spec.element.emax  # the least exponent of an amax that overflows
        if self.overflow_to_nan and beyond < 128:
            rows = _fill_blocks(rows, spec, lambda amax: amax >= 2.0**beyond, math.nan)
        return rows, spec

    def _rounding(self, element: ElementFormat, number: int | None) -> str:
        if number is not None:
            if type(number) is not int or not 0 <= number < len(self.rounding_modes):
                numbered = ", ".join(f"{i} ({name})" for i, name in enumerate(self.rounding_modes)) or "none"
                raise MXError(f"{self.name} has no rounding_mode {number!r}: allowed: {numbered}")
            if element.is_int:
                return self.rounding_modes[number]
        return dict(self.rounding_of).get(element.name, self.rounding)

    def _nibbles(self, data: Tensor, spec: MXSpec) -> Tensor:
        return data << 4 | data >> 4 if spec.element.bits == 4 and self.high_nibble_first else data

    def _shares_bytes(self, spec: MXSpec) -> bool:
        """Whether codes are stored as `quantize_mx` packs them; else each takes a byte."""
        return not is_packed(spec.element.bits) or spec.element.bits in self.packed_widths

    def _shifts_scale(self, spec: MXSpec) -> bool:
        """Whether scale bytes differ: of 8-bit integers, the only ones that such a library has."""
        return self.int_scale_offset != 0 and spec.element.is_int and spec.element.bits == 8


def _fill_blocks(x: Tensor, spec: MXSpec, where: Callable[[Tensor], Tensor], value: float) -> Tensor:
    """x with `value` in the blocks of whose largest magnitude `where` is true."""
    axis, rows = check_spec(x, spec).axis, torch.atleast_1d(x)
    if not rows.numel():
        return x
    blocks = rows.split(spec.block_size, axis)
    parts = [block.masked_fill(where(block.abs().amax(axis, keepdim=True)), value) for block in blocks]
    return torch.cat(parts, axis).reshape(x.shape)


_ROUNDED_LOG2 = "exponents from a rounded log2 (off by one a few ulps below a power of two)"

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "microxcaling",
            "7bc4195",
            "rounds half away from zero unless told otherwise (round='nearest'); a block whose exponent is above what "
            "the scale holds (scale_exp_bits below 8) becomes NaN",
            f"{_ROUNDED_LOG2}; 0.49999997 of a step rounds up; bf16 inputs computed in bf16",
            rounding="half_away",
            overflow_to_nan=True,
        ),
        Preset(
            "microxcaling_flush",
            "7bc4195",
            "microxcaling with mx_flush_fp32_subnorms",
            "as microxcaling",
            rounding="half_away",
            overflow_to_nan=True,
            flush_subnormal_blocks=True,
        ),
        Preset(
            "torchao",
            "0.18.0",
            "stores an FP6 code in a byte of its own",
            f"scale byte 0 halves or flushes values; an Inf leaves the scale finite; RCEIL with {_ROUNDED_LOG2}; codes "
            "in NaN blocks, in FP8 0x7F for a NaN (here 0: the scale byte says it)",
            packed_widths=(4,),
        ),
        Preset(
            "torchmx",
            "0.1.0",
            "the first of two FP4 codes in the high nibble; int8 codes are whole numbers, so their scale byte is 6 "
            "lower; stores an FP6 code in a byte of its own",
            "int8 blocks below 2**-121 lose precision",
            int_scale_offset=-6,
            high_nibble_first=True,
            packed_widths=(4,),
        ),
        Preset(
            "quark",
            "0.13",
            "MXFixNeuron: axis 1, int8 down to -128 and by rounding_mode 0 half away from zero, 1 half up, 2 half to "
            "even; floats half to even whatever it says",
            "Inf and NaN pass by value instead of making their block NaN; scales below 2**-127; a tensor of one value "
            "stays as it is",
            rounding_of=(("int8_full", "half_away"),),
            rounding_modes=("half_away", "half_up", "even"),
            axis=1,
            full_range=True,
        ),
        Preset(
            "pychop",
            "0.6.2",
            "blocks over all values in order, whatever the shape; integers down to -2**(bits - 1)",
            f"{_ROUNDED_LOG2}; Inf and NaN by value; -0 becomes +0; its torch backend ignores block_size",
            axis=None,
            full_range=True,
        ),
        Preset(
            "modelopt",
            "a2fbac7",
            "rceil scales; its FP4 packer rounds ties toward zero",
            f"{_ROUNDED_LOG2}; +0 stored as -0 in FP4",
            scale_mode="rceil",
            rounding_of=(("fp4_e2m1", "half_toward_zero"),),
        ),
    )
}


def table() -> str:
    """The presets in Markdown: what differs from the defaults and why, and what is not copied."""
    rows = [("preset", "version", "what differs", "faults not copied"), ("---",) * 4]
    rows += [(f"`{p.name}`", p.version, p.reason, p.not_copied) for p in PRESETS.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
