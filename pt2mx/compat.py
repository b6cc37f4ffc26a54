"""Presets of other libraries' conventions that differ from pt2mx's defaults, by name.

A preset reproduces a library's documented scale mode, rounding, integer range, axis, and storage of codes and scales.
It does not reproduce bugs: where a library violates the specification, the preset gives the specified value, and
`not_copied` lists the bug.

    scale, data = PRESETS["torchmx"].quantize(x, "mxfp4")  # the bytes that TorchMX stores
    y = PRESETS["torchmx"].fake_quantize(x, "mxint8")
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.formats import ELEMENTS, ElementFormat
from pt2mx.functional import dequantize_mx, fake_quantize_mx, quantize_mx, tensor_scale_mx
from pt2mx.kernels.elements import NAN_SCALE
from pt2mx.kernels.packing import is_packed, pack, unpack
from pt2mx.ops.checks import check_input, check_tensors
from pt2mx.scale_formats import parse_scale_format
from pt2mx.spec import MXSpec, parse

__all__ = ["PRESETS", "Preset", "table"]

#: pt2mx's defaults
_PLAIN = MXSpec("int8")


@dataclass(frozen=True)
class Preset:
    """One library's conventions; the defaults are pt2mx's own.

    Args:
        name, version: the library.
        rounding, scale_mode, axis, block_size: its defaults; `axis=None` flattens the tensor to one row.
        rounding_of: (element name, rounding) pairs for elements with another rounding, under E8M0 scales.
        rounding_modes: the roundings of integers that `rounding_mode=0, 1, ...` of `spec` selects.
        full_range: True if its integers use the most negative code.
        int_scale_offset: added to the scale bytes of 8-bit integers, because its codes are whole numbers.
        high_nibble_first: True if the first of two 4-bit codes is in the high nibble of their byte.
        packed_widths: the widths of codes that share bytes; a code of another width takes a byte.
        flush_subnormal_blocks: True sets a block to zero if its largest magnitude is an fp32 subnormal.
        float_scale_mode: its scale mode for scale formats with a significand.
        divides_by_tensor_scale: True if its tensor scale is a divisor of block scales, the reciprocal of a factor.
        overflow_to_nan: True sets a block to NaN if its shared exponent exceeds the range of the scale
            (`scale_exp_bits` below 8; scale mode floor).
        reason: how the preset differs from the defaults.
        not_copied: violations of the specification that the preset does not reproduce.

    Example:
        >>> import torch
        >>> from pt2mx.compat import PRESETS, Preset
        >>> mine = Preset("mine", "1.0", "rounds toward zero", "", rounding="toward_zero")
        >>> x = torch.tensor([1.75, 2.9, -5.9, 0.3])
        >>> mine.fake_quantize(x, "mxfp4")
        tensor([ 1.5000,  2.0000, -4.0000,  0.0000])
        >>> PRESETS["modelopt"].fake_quantize(x, "mxfp4")
        tensor([ 1.5000,  3.0000, -6.0000,  0.5000])
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
    float_scale_mode: str = "nearest"
    divides_by_tensor_scale: bool = False
    overflow_to_nan: bool = False

    def spec(self, elem_dtype: object, rounding_mode: int | None = None, **fields: Any) -> MXSpec:
        """Return the library's spec of an element.

        Args:
            elem_dtype: a spelling that `pt2mx.parse` takes; what it says besides the element overrides the preset.
            rounding_mode: the library's number of a rounding; by default the preset's rounding.
            fields: fields of `MXSpec`, which override both.

        Returns:
            The spec. If the preset's axis is None, the spec's axis is -1, the axis of the flattened tensor.

        Raises:
            MXError: for an unknown element or field, and a number that the library does not have.

        Example:
            >>> from pt2mx.compat import PRESETS
            >>> print(PRESETS["quark"].spec("int8", rounding_mode=1))
            mxint8_full{32}(half_up)
        """
        spelled = parse(elem_dtype)
        element, scale_format = spelled.element, fields.get("scale_format", spelled.scale_format)
        scale_format = parse_scale_format(scale_format)
        if self.divides_by_tensor_scale and scale_format.tensor == "factor":
            scale_format = parse_scale_format(f"{scale_format}_divisor")
        if self.full_range and element.is_int and not element.full_range:
            element = ELEMENTS.get(f"{element.name}_full", element)  # a registered one has the values that it has
        is_mx = scale_format.is_power_of_two
        preset = {
            "block_size": self.block_size,
            "axis": -1 if self.axis is None else self.axis,
            "scale_mode": self.scale_mode if is_mx else self.float_scale_mode,
            "rounding": self._rounding(element, rounding_mode) if is_mx else "even",
        }
        plain = _PLAIN.replace(scale_format=spelled.scale_format)
        said = {name: value for name, value in vars(spelled).items() if value != getattr(plain, name)}
        return MXSpec(**{**preset, **said, **fields, "element": element, "scale_format": scale_format})

    def tensor_scale(self, x: Tensor, elem_dtype: object, **fields: Any) -> Tensor:
        """Return the scale of a whole tensor as the library stores it, of formats that have one.

        Args:
            x: float32, float16 or bfloat16.
            elem_dtype, fields: as in `spec`.

        Returns:
            () float32.

        Raises:
            MXError: as `spec` and `pt2mx.tensor_scale_mx`.

        Example:
            >>> import torch
            >>> from pt2mx.compat import PRESETS
            >>> x = torch.tensor([1344.0, 1.0])  # half of 6 * 448
            >>> [PRESETS[name].tensor_scale(x, "nvfp4").item() for name in ("modelopt", "compressed_tensors")]
            [0.5, 2.0]
        """
        return tensor_scale_mx(x, self.spec(elem_dtype, **fields))

    def fake_quantize(self, x: Tensor, elem_dtype: object, **fields: Any) -> Tensor:
        """Quantize and dequantize as the library does.

        Args:
            x: (..., n, ...) float32, float16 or bfloat16.
            elem_dtype, fields: as in `spec`.

        Returns:
            (..., n, ...) in the dtype of x.

        Raises:
            MXError: as `spec` and `pt2mx.fake_quantize_mx`.
        """
        rows, spec = self._rows(x, elem_dtype, fields)
        return fake_quantize_mx(rows, spec).reshape(x.shape)

    def quantize(
        self, x: Tensor, elem_dtype: object, tensor_scale: Tensor | None = None, **fields: Any
    ) -> tuple[Tensor, Tensor]:
        """Quantize to the bytes that the library stores.

        Args:
            x: (..., n, ...) float32, float16 or bfloat16.
            elem_dtype, fields: as in `spec`.
            tensor_scale: () float32, of formats that have one, as `tensor_scale` gives it.

        Returns:
            scale: (..., blocks, ...) uint8.
            data: (..., bytes, ...) uint8.

        Raises:
            MXError: as `spec` and `pt2mx.quantize_mx`; also if the library's scale byte cannot represent the exponent
                (TorchMX's int8 below 2**-121).

        Example:
            >>> import torch
            >>> from pt2mx.compat import PRESETS
            >>> x = torch.tensor([1.0, 2.0, 3.0, 6.0])
            >>> PRESETS["torchao"].quantize(x, "mxfp4")
            (tensor([127], dtype=torch.uint8), tensor([ 66, 117], dtype=torch.uint8))
            >>> PRESETS["torchmx"].quantize(x, "mxfp4")  # the first code in the high nibble
            (tensor([127], dtype=torch.uint8), tensor([36, 87], dtype=torch.uint8))
        """
        rows, spec = self._rows(x, elem_dtype, fields)
        length = torch.atleast_1d(rows).shape[spec.axis]
        return self.to_storage(*quantize_mx(rows, spec, tensor_scale=tensor_scale), spec, length)

    def dequantize(
        self,
        data: Tensor,
        scale: Tensor,
        elem_dtype: object,
        target_dtype: torch.dtype = torch.float32,
        length: int | None = None,
        tensor_scale: Tensor | None = None,
        **fields: Any,
    ) -> Tensor:
        """Dequantize the bytes that the library stores.

        Args:
            data, scale: as `quantize` returns them.
            elem_dtype, fields: as in `spec`.
            target_dtype: of the result: float32, float16 or bfloat16.
            length: values along the axis, by default all in `data`; ignored if each code takes a byte.
            tensor_scale: as in `quantize`.

        Returns:
            (..., length, ...) in `target_dtype`.

        Raises:
            MXError: as `spec` and `pt2mx.dequantize_mx`.
        """
        check_tensors(data=data, scale=scale)
        spec = self.spec(elem_dtype, **fields)
        if not self._shares_bytes(spec) and data.dim():
            length = data.shape[spec.axis]
        scale, data = self.from_storage(scale, data, spec)
        return dequantize_mx(data, scale, spec, target_dtype=target_dtype, length=length, tensor_scale=tensor_scale)

    def to_storage(self, scale: Tensor, data: Tensor, spec: MXSpec, length: int) -> tuple[Tensor, Tensor]:
        """Convert the results of `pt2mx.quantize_mx` to the library's bytes.

        Args:
            scale, data: as `pt2mx.quantize_mx` returns them.
            spec: their format, as `spec` returns it.
            length: values along the axis.

        Returns:
            scale and data as `quantize` returns them.

        Raises:
            MXError: as `quantize`.
        """
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
        """Convert the library's bytes to the arguments of `pt2mx.dequantize_mx`.

        Args:
            scale, data: as `quantize` returns them.
            spec: their format, as `spec` returns it.

        Returns:
            scale and data, both (..., bytes, ...) uint8.
        """
        if self._shifts_scale(spec):
            shifted = (scale.to(torch.int16) - self.int_scale_offset).clamp(max=NAN_SCALE - 1).to(torch.uint8)
            scale = torch.where(scale == NAN_SCALE, scale, shifted)
        if self._shares_bytes(spec):
            return scale, self._nibbles(data, spec)
        return scale, pack(data.to(torch.int32), spec.axis % data.dim(), spec.element.bits)

    def _rows(self, x: Tensor, elem_dtype: object, fields: dict[str, Any]) -> tuple[Tensor, MXSpec]:
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
        """Return whether codes are packed as by `quantize_mx`; otherwise each takes a byte."""
        return not is_packed(spec.element.bits) or spec.element.bits in self.packed_widths

    def _shifts_scale(self, spec: MXSpec) -> bool:
        """Return whether scale bytes differ. They do for 8-bit integers, the only integers of such a library."""
        return self.int_scale_offset != 0 and spec.element.is_int and spec.element.bits == 8


def _fill_blocks(x: Tensor, spec: MXSpec, where: Callable[[Tensor], Tensor], value: float) -> Tensor:
    """Fill the blocks of x for whose largest magnitude `where` is true with `value`."""
    axis, rows = check_input(x, spec).axis, torch.atleast_1d(x)
    if not rows.numel():
        return x
    parts = [b.masked_fill(where(b.abs().amax(axis, keepdim=True)), value) for b in rows.split(spec.block_size, axis)]
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
            "stores an FP6 code in a byte of its own; NVFP4 multiplies by reciprocals, and its smallest scale is 2**-6",
            f"scale byte 0 halves or flushes values; an Inf leaves the scale finite; RCEIL with {_ROUNDED_LOG2}; codes "
            "in NaN blocks, in FP8 0x7F for a NaN (here 0: the scale byte says it)",
            packed_widths=(4,),
            float_scale_mode="nearest_reciprocal",
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
        Preset(
            "compressed_tensors",
            "0.20.0",
            "the tensor scale of NVFP4 is a divisor (448 * 6 / amax); a block scale that rounds to zero becomes 1/8, "
            "so that its values become zero",
            "a tensor below 2**-116 gets the tensor scale 1, and all its values become zero",
            float_scale_mode="nearest_flush",
            divides_by_tensor_scale=True,
        ),
        Preset(
            "nki",
            "Neuron 2.32.0",
            "by the documentation of `nki.isa.quantize_mx` (MXFP8, Trainium3): a block scale twice that of section 6.3",
            "never ran here; the documentation does not say what becomes of Inf, NaN, and scales below 2**-127",
            scale_mode="doubled",
        ),
    )
}


def table() -> str:
    """Return the presets as a table in Markdown: the differences from the defaults, and the bugs that are not copied.

    Returns:
        A heading, a rule, and a line for each preset.

    Example:
        >>> from pt2mx import compat
        >>> for line in compat.table().splitlines()[2:5]:
        ...     print(line[:62])
        | `microxcaling` | 7bc4195 | rounds half away from zero unless
        | `microxcaling_flush` | 7bc4195 | microxcaling with mx_flush_
        | `torchao` | 0.18.0 | stores an FP6 code in a byte of its own
    """
    rows = [("preset", "version", "what differs", "faults not copied"), ("---",) * 4]
    rows += [(f"`{p.name}`", p.version, p.reason, p.not_copied) for p in PRESETS.values()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
