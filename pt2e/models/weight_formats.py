"""The formats of weights in checkpoints: their names, their blocks, and checks of codes and scales.

The name of a format is that of the element for blocks of 32 with E8M0 scales, otherwise a text that `pt2mx.parse`
reads, such as "nvfp4" or "fp8_e4m3{128x128}(f32)".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.packing import packed_length
from pt2mx.scale_formats import SCALE_FORMATS
from pt2mx.spec import MXSpec, parse

#: values that share an E8M0 scale of one row
BLOCK = 32
#: NVFP4 with the tensor scale as a factor, and as a divisor
NVFP4, NVFP4_DIVISOR = "nvfp4", "fp4_e2m1{16}(e4m3_f32_divisor)"
#: FP8 whose blocks have float32 scales
FP8_BLOCKS = "fp8_e4m3{128x128}(f32)"
#: dtype of scales that are floats -> the scale format
_FLOAT_SCALES = {form.dtype: name for name, form in SCALE_FORMATS.items() if form.dtype.is_floating_point}


@dataclass(frozen=True)
class Stored:
    """The tensors of one weight: suffixes of its name, and their dtypes.

    Args:
        data, scale: the suffixes of the codes and of the scales.
        dtype, scale_dtype: their dtypes in files.
        tensor_scale: the suffix of the scale of the whole tensor, (1,) or () float32; "" for none.
        tensor_scale_shape: its shape in files.
        by_block: the codes of a block have their own dimension: (..., N, K / 32, bytes of 32).
        spread_scales: scales have dimensions of 1: (..., blocks of N, 1, blocks of K, 1).
    """

    data: str
    scale: str
    dtype: torch.dtype = torch.uint8
    scale_dtype: torch.dtype = torch.uint8
    tensor_scale: str = ""
    tensor_scale_shape: tuple[int, ...] = ()
    by_block: bool = False
    spread_scales: bool = False


class PackedTensors(NamedTuple):
    """A weight as codes and scales.

    Args:
        data: (..., N, bytes of K) uint8.
        scale: (..., blocks of N, blocks of K), in the dtype of the spec's scale format.
        spec: the format.
        tensor_scale: () float32, for a scale format with one; (E,) for E matrices with one each.
    """

    data: Tensor
    scale: Tensor
    spec: MXSpec
    tensor_scale: Tensor | None = None

    @property
    def stated_tensor_scale(self) -> Tensor:
        """The tensor scale of a scale format with one."""
        if self.tensor_scale is None:
            raise MXError(f"codes in {self.spec} have no tensor scale: give the checkpoint's")
        return self.tensor_scale


def format_of(spec: MXSpec) -> str:
    """Return the name of the format that a weight or an input has: its element, for E8M0 scales of one row."""
    if spec.has_plain_scale:
        return spec.element.name
    if spec.replace(axis=-1, scale_mode=None, rounding="even") == spec_of(NVFP4):
        return NVFP4
    scales = "" if spec.has_e8m0_scale else f"({spec.scale_format})"
    return f"{spec.element.name}{{{spec.blocks}}}{scales}"


@cache
def spec_of(form: str) -> MXSpec:
    """Return the spec that the name of a weight format means, with the default modes."""
    return parse(form)


def spec_by_grid(weight: str, data: Tensor, scale: Tensor, block: tuple[int, int]) -> MXSpec:
    """Return the format of a weight from its codes and the grid of its scales.

    Args:
        weight: its name.
        data: codes of E4M3, or bytes with two codes of FP4 each.
        scale: (..., blocks of N, blocks of K), E8M0 or floats.
        block: the rows and columns of a block that the configuration states. Otherwise blocks are 1 x 32, or those into
            which the grid divides the weight evenly.
    """
    element = "fp4_e2m1" if data.dtype in (torch.int8, torch.uint8) else "fp8_e4m3"
    if data.dim() < 2 or scale.dim() != data.dim():
        raise MXError(_misfit(weight, element, data, scale))
    rows, columns = data.shape[-2], data.shape[-1] * (2 if element == "fp4_e2m1" else 1)
    grid = tuple(scale.shape[-2:])
    blocks = [block, (1, BLOCK)]
    if 0 not in grid and rows % grid[0] == 0 and columns % grid[1] == 0:
        blocks.append((rows // grid[0], columns // grid[1]))
    for height, width in blocks:
        if height and width and (-(-rows // height), -(-columns // width)) == grid:
            return MXSpec(element, width, scale_format=_FLOAT_SCALES.get(scale.dtype, "e8m0"), block_rows=height)
    raise MXError(_misfit(weight, element, data, scale))


def as_grid(scale: Tensor, dimensions: int) -> Tensor:
    """Return ModelOpt's scales as (..., blocks of N, blocks of K), of so many dimensions: they are one number, (N,), or
    have dimensions of 1 between."""
    if scale.dim() == dimensions + 2:
        return scale.squeeze(-1).squeeze(-2)
    return scale.reshape(-1, 1) if scale.dim() < 2 else scale


def _misfit(weight: str, element: str, data: Tensor, scale: Tensor) -> str:
    return (
        f"{weight} has codes of shape {tuple(data.shape)} and scales of shape {tuple(scale.shape)}: no block of "
        f"{element} gives such a grid"
    )


def check_grid(weight: str, form: str, spec: MXSpec, data: Tensor, scale: Tensor) -> None:
    """Raise an `MXError` for codes, (..., N, bytes of K) uint8, and scales, (..., blocks of N, blocks of K), that are
    no blocks of their format along the last dimension."""
    if spec.block_rows > 1:
        columns = data.shape[-1] * 8 // spec.element.bits
        expected = spec.scale_shape((*data.shape[:-1], columns))
        if scale.shape != expected:
            raise MXError(f"{_misfit(weight, form, data, scale)}, but {expected}")
        return
    block_bytes = packed_length(spec.block_size, spec.element.bits)
    if data.shape != (*scale.shape[:-1], scale.shape[-1] * block_bytes):
        raise MXError(
            f"{weight} has codes of shape {tuple(data.shape)} and scales of shape {tuple(scale.shape)}: of {form} a "
            f"scale must have {block_bytes} bytes of codes, a whole block of {spec.block_size} values along the last "
            "dimension"
        )


def is_misread(spec: MXSpec, rows: int, columns: int) -> bool:
    """Return True for blocks of several rows, the last of which is shorter, that loaders would take for equal ones.

    Loaders divide the shape by the grid of scales. Where that leaves a rest, they know the block or refuse the weight.
    """
    misread = False
    for n, block in ((rows, spec.block_rows), (columns, spec.block_size)):
        count = -(-n // block)
        if n % count:
            return False
        misread |= count > 1 and n != count * block
    return misread


def check_last_blocks(weight: str, spec: MXSpec, data: Tensor, rows: int | None = None) -> None:
    """Raise an `MXError` for a weight that loaders would read in other blocks; `rows`: of the whole weight, if `data`
    holds some of them."""
    rows, columns = data.shape[-2] if rows is None else rows, data.shape[-1] * 8 // spec.element.bits
    if spec.block_rows > 1 and is_misread(spec, rows, columns):
        block = f"{spec.block_rows} x {spec.block_size}"
        raise MXError(
            f"{weight} is {rows} x {columns}, which loaders would divide into equal blocks instead of {block}: leave "
            "it in high precision"
        )


def check_scales(name: str, spec: MXSpec, data: Tensor, scale: Tensor) -> None:
    """Raise an `MXError` for scales that are negative or NaN, and for a scale of zero with codes that are not zero.

    Integers may have any scale: GGUF's Q4_0 gives the largest value of a block the code -8, whatever its sign.
    """
    if spec.has_power_of_two_scale or spec.element.is_int:
        return
    value = scale if scale.dtype.is_floating_point else scale.view(torch.float8_e4m3fn).float()
    if bool((value.signbit() | value.isnan()).any()):
        kind = "NaN" if bool(value.isnan().any()) else "negative"
        raise MXError(f"{name} holds {kind} scales: fetch the checkpoint again")
    zero = value == 0  # (..., blocks of N, blocks of K)
    if not bool(zero.any()):
        return
    magnitude = data & (0x77 if spec.element.bits == 4 else 0x7F)  # (..., N, bytes of K)
    per_block = packed_length(spec.block_size, spec.element.bits)
    spread = zero.repeat_interleave(per_block, -1)[..., : data.shape[-1]]
    if spec.block_rows > 1:
        spread = spread.repeat_interleave(spec.block_rows, -2)[..., : data.shape[-2], :]
    if bool((spread & (magnitude != 0)).any()):
        raise MXError(f"{name} holds a scale of 0 for codes that are not 0: fetch the checkpoint again")


def read_tensor_scale(name: str, tensor: Tensor) -> Tensor:
    """Return the scale of a whole tensor, () float32."""
    if tensor.dtype != torch.float32 or tensor.numel() != 1:
        raise MXError(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: a tensor scale is one float32 number")
    value = tensor.item()
    if not 0 < value < float("inf"):
        raise MXError(f"{name} is {value:g}: a tensor scale is a positive number")
    return tensor.reshape(())


def with_float_scales(packed: PackedTensors, scale: Tensor) -> PackedTensors:
    """Return the same codes with float32 scales."""
    return PackedTensors(packed.data, scale, packed.spec.replace(scale_format="f32"))
