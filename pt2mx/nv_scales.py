"""Convert scales between E8M0 and NVFP4 exactly, for the same codes: a scale that would be rounded is an error."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.elements import BIAS, NAN_SCALE
from pt2mx.kernels.float_scales import code_of, scale_values
from pt2mx.kernels.packing import split_axis, trim_axis, unpack, unpacked_length
from pt2mx.ops.checks import check_tensor_scale, check_tensors
from pt2mx.spec import MXSpec, parse


def mx_to_nv_scales(
    data: Tensor,
    scale: Tensor,
    elem_dtype: object = "mxfp4",
    length: int | None = None,
    block_size: int = 16,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return E4M3 scales and a float32 scale of the tensor with which the same codes have the same values.

    Each block becomes `32 / 16` blocks. The tensor scale is a power of two, by default the one that puts the largest
    block's scale on 256, so that scales down to 2**-17 of it are exact. A block of zeros gets the scale 1.

    Args:
        data, scale: as `quantize_mx` returns them for an E8M0 format.
        elem_dtype: their format, as `pt2mx.parse` takes it; its block size is a multiple of `block_size`.
        length: values along the axis, where packing rounded them up.
        block_size: values that share a scale in the result.
        tensor_scale: one float32 power of two, such as the largest of several tensors that share it.

    Returns:
        scale: (..., ceil(length / block_size), ...) uint8, E4M3.
        tensor_scale: () float32.

    Raises:
        MXError: for a block whose scale E4M3 does not represent, naming the block; for shapes that do not fit; for a
            tensor scale that is no power of two.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.tensor([6.0] * 32 + [24.0] * 32)
        >>> scale, data = pt2mx.quantize_mx(x, "mxfp4")
        >>> nv_scale, tensor_scale = pt2mx.mx_to_nv_scales(data, scale)
        >>> nv_scale.view(torch.float8_e4m3fn).float(), tensor_scale
        (tensor([ 64.,  64., 256., 256.]), tensor(0.0156))
        >>> torch.equal(pt2mx.dequantize_mx(data, nv_scale, "nvfp4", tensor_scale=tensor_scale), x)
        True
    """
    spec = parse(elem_dtype)
    check_tensors(data=data, scale=scale, **({} if tensor_scale is None else {"tensor_scale": tensor_scale}))
    target = _nv_spec(spec, block_size)  # raises for a bad block size
    if not spec.has_plain_scale or spec.block_size % block_size:
        raise MXError(f"{spec} has no E8M0 scales of blocks that consist of blocks of {block_size}")
    check_tensor_scale(target, tensor_scale, data, required=False)
    length = _length(data, spec, length)
    _check_scale(scale, data, spec, length)
    axis = spec.axis % data.dim()
    fine = trim_axis(scale.repeat_interleave(spec.block_size // block_size, axis), axis, -(-length // block_size))
    used = _nonzero_blocks(data, target, length) & (fine != NAN_SCALE)
    exponent = fine.to(torch.int32) - BIAS + int(math.log2(spec.element.unit))
    grid = target.scale_format.grid
    top = int(exponent[used].max()) if used.any() else 0
    shift = max(top - grid.emax, -126) if tensor_scale is None else _exponent(tensor_scale)
    least = grid.emin - grid.mantissa_bits
    relative = exponent - shift
    _raise_where(
        used & ((relative < least) | (relative > grid.emax)),
        f"{{}} has the scale 2**{{}}, which is not within 2**{shift + least} to 2**{shift + grid.emax}, the powers of "
        f"two of E4M3 with the tensor scale 2**{shift}",
        exponent,
    )
    relative = torch.where(used, relative, 0).clamp(least, grid.emax)
    codes = code_of(torch.exp2(relative.to(torch.float64)).to(torch.float32), target)
    codes = torch.where(fine == NAN_SCALE, target.scale_format.nan, codes).to(torch.uint8)
    return codes, torch.full((), 2.0**shift, dtype=torch.float32, device=scale.device)


def nv_to_mx_scales(
    data: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    elem_dtype: object = "nvfp4",
    length: int | None = None,
    block_size: int = 32,
) -> Tensor:
    """Return the E8M0 scales with which the same codes have the same values, in larger blocks.

    Args:
        data, scale, tensor_scale: as `quantize_mx` takes and returns them.
        elem_dtype: their format, as `pt2mx.parse` takes it; `block_size` is a multiple of its block size.
        length: values along the axis, where packing rounded them up.
        block_size: values that share a scale in the result.

    Returns:
        (..., ceil(length / block_size), ...) uint8, E8M0.

    Raises:
        MXError: for scales that are no powers of two, or differ within a block, naming the block.

    Example:
        >>> import torch, pt2mx
        >>> scale, data = pt2mx.quantize_mx(torch.tensor([6.0] * 32), "mxfp4")
        >>> nv_scale, tensor_scale = pt2mx.mx_to_nv_scales(data, scale)
        >>> torch.equal(pt2mx.nv_to_mx_scales(data, nv_scale, tensor_scale), scale)
        True
    """
    spec = parse(elem_dtype)
    check_tensors(data=data, scale=scale, tensor_scale=tensor_scale)
    spec.replace(block_size=block_size)  # raises for a bad block size
    if not spec.has_tensor_scale or spec.divides_by_tensor_scale or spec.block_rows > 1 or block_size % spec.block_size:
        raise MXError(f"blocks of {block_size} do not consist of blocks of {spec} with a factor a tensor")
    check_tensor_scale(spec, tensor_scale, data)
    length = _length(data, spec, length)
    _check_scale(scale, data, spec, length)
    axis = spec.axis % data.dim()
    nan = scale.to(torch.int32) == spec.scale_format.nan
    value = scale_values(scale, spec).to(torch.float64) * tensor_scale.to(torch.float64)
    mantissa, exponent = torch.frexp(torch.where(nan, 1.0, value) / spec.element.unit)
    exponent = exponent - 1
    used = _nonzero_blocks(data, spec, length) & ~nan
    fits = (mantissa == 0.5) & (exponent >= -BIAS) & (exponent <= BIAS)
    _raise_where(used & ~fits, "{} has the scale {:g}, which is no power of two from 2**-127 to 2**127", value)
    marked = torch.where(nan, NAN_SCALE, torch.where(used, exponent + BIAS, -1))
    group = block_size // spec.block_size
    groups = split_axis(marked + 1, axis, group)  # padded with zeros: unused
    coarse = groups.amax(axis + 1, keepdim=True)
    _raise_where(
        ((groups != coarse) & (groups != 0)).any(axis + 1),
        f"{{}} of {block_size} values has several scales, up to the E8M0 byte {{}}",
        coarse.squeeze(axis + 1) - 1,
    )
    return (coarse.squeeze(axis + 1) - 1).clamp(min=0).to(torch.uint8)


def _exponent(tensor_scale: Tensor) -> int:
    """Return the exponent of a power of two."""
    mantissa, exponent = math.frexp(tensor_scale.item())
    if mantissa != 0.5:
        raise MXError(f"tensor_scale={tensor_scale.item():g} is no power of two: no exact conversion")
    return exponent - 1


def _nv_spec(spec: MXSpec, block_size: int) -> MXSpec:
    return spec.replace(scale_format="e4m3_f32", block_size=block_size)


def _length(data: Tensor, spec: MXSpec, length: int | None) -> int:
    return unpacked_length(data.shape[spec.axis], spec.element.bits) if length is None else length


def _check_scale(scale: Tensor, data: Tensor, spec: MXSpec, length: int) -> None:
    expected = list(data.shape)
    expected[spec.axis] = -(-length // spec.block_size)
    if list(scale.shape) != expected or (data.dtype, scale.dtype) != (torch.uint8, torch.uint8):
        raise MXError(
            f"scale of shape {tuple(scale.shape)} and {scale.dtype} does not fit data of shape {tuple(data.shape)} and "
            f"{data.dtype}: {spec} has uint8 scales of shape {tuple(expected)}"
        )


def _nonzero_blocks(data: Tensor, spec: MXSpec, length: int) -> Tensor:
    """Return whether a block has a value other than zero: (..., blocks, ...)."""
    axis, element = spec.axis % data.dim(), spec.element
    codes = trim_axis(unpack(data, axis, element.bits), axis, length)
    magnitude = codes if element.is_int else codes & ((1 << (element.bits - 1)) - 1)
    return split_axis(magnitude, axis, spec.block_size).any(axis + 1)


def _raise_where(where: Tensor, message: str, shown: Tensor) -> None:
    if bool(where.any()):
        index = where.nonzero()[0].tolist()
        raise MXError("no exact conversion: " + message.format(f"block {index}", shown[tuple(index)].item()))
