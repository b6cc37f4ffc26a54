"""Checks of the operators' arguments: each names the value, what is allowed and what to do."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from pt2mx.errors import MXError, nearest
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS
from pt2mx.kernels.packing import packed_length, resized, unpacked_length
from pt2mx.modes import ROUNDINGS
from pt2mx.spec import MXSpec

#: dtypes that can be quantized, and dequantized to
HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)
#: What becomes of the gradient: it passes unchanged, or is zero where the value saturated.
STRAIGHT_THROUGH = ("identity", "clipped")


def from_front(spec: MXSpec, x: Tensor) -> MXSpec:
    """Return a spec whose axis counts from the front of the dimensions of x; raise `MXError` for an axis that x does
    not have."""
    rank = x.dim() or 1  # a 0-d tensor is quantized as one of shape (1,)
    if 0 <= spec.axis < rank and spec.block_rows == 1:
        return spec
    if not -rank <= spec.axis < rank:
        raise MXError(f"axis={spec.axis} is out of range for shape {tuple(x.shape)}: allowed are {-rank} to {rank - 1}")
    return _from_front(spec, rank)


@functools.lru_cache(maxsize=1024)
def _from_front(spec: MXSpec, rank: int) -> MXSpec:
    if spec.block_rows > 1:
        spec.row_axis(rank)  # raises for a tensor without rows
    return spec.replace(axis=spec.axis % rank)


def holds(statement: bool | torch.SymBool) -> bool:
    """Return whether a statement about sizes holds; False where only the data decide it, before they are known."""
    if isinstance(statement, bool):
        return statement
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # a slow import that eager calls do not need

    return guard_or_false(statement)


def check_tensors(**tensors: object) -> None:
    """Raise `MXError` for an argument, given by its name, that is no dense tensor."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise MXError(f"{name} must be a torch.Tensor, not {type(value).__name__}: convert it with torch.as_tensor")
        if value.layout != torch.strided or value.is_nested:
            raise MXError(f"{name} must be a dense tensor, not one of layout {value.layout}: use its .to_dense() form")


def check_length(length: object) -> None:
    """Raise `MXError` for a `length` that is no size of a dimension; a symbolic one passes."""
    if not (length is None or isinstance(length, torch.SymInt) or _is_count(length)):
        raise MXError(f"length={length!r} must be an integer of at least 0, or None for every code that data holds")


def check_input(x: Tensor, spec: MXSpec) -> MXSpec:
    """Return the spec with its axis counted from the front; raise `MXError` for an axis that x does not have, and for
    another dtype of x."""
    if x.dtype not in HIGH_PRECISION:
        raise MXError(
            f"cannot quantize a tensor of dtype {x.dtype} to an MX format: allowed are float32, float16 and bfloat16; "
            "cast it first, for example with x.float()"
        )
    return from_front(spec, x)


def check_tensor_scale(
    spec: MXSpec, tensor_scale: Tensor | None, x: Tensor, required: bool = True, each: bool = False
) -> None:
    """Raise `MXError` for a tensor scale that the scale format does not have, or of another dtype, shape or device than
    it has for the values or codes x. With `each` it may be one of each matrix of x, whose blocks lie in matrices."""
    if tensor_scale is None:
        if required and spec.has_tensor_scale:
            raise MXError(
                f"{spec} has a tensor scale: pass tensor_scale, for example tensor_scale_mx(x, {str(spec)!r})"
            )
        return
    if not spec.has_tensor_scale:
        raise MXError(f"{spec} has no tensor scale, but tensor_scale was passed: leave it out")
    shapes, text = [(), (1,)], "one float32 number"
    if each and x.dim() == 3 and spec.axis % 3:
        shapes, text = [*shapes, (x.shape[0],)], f"{text}, or one for each of the {x.shape[0]} matrices"
    if tuple(tensor_scale.shape) not in shapes or tensor_scale.dtype != torch.float32:
        raise MXError(
            f"tensor_scale must be {text}, not of shape {tuple(tensor_scale.shape)} and {tensor_scale.dtype}: pass "
            "tensor_scale.float(), reshaped"
        )
    if tensor_scale.device != x.device:
        raise MXError(
            f"tensor_scale is on {tensor_scale.device} and the tensor on {x.device}: move one to the device of the "
            "other"
        )


def check_seed(seed: object) -> None:
    """Raise `MXError` for what is no seed of stochastic rounding; a symbolic one is taken as it is."""
    if not (seed is None or isinstance(seed, torch.SymInt) or _is_count(seed)):
        raise MXError(
            f"seed={seed!r} must be an integer from 0 to 2**63 - 1, a torch.Generator, or None for a new draw each call"
        )


def check_ste(ste: object) -> None:
    """Raise `MXError` for a gradient that is not one of `STRAIGHT_THROUGH`."""
    if not isinstance(ste, str) or ste not in STRAIGHT_THROUGH:
        raise MXError(f"unknown ste {ste!r}: {nearest(ste, STRAIGHT_THROUGH)}")


def check_packed(
    data: Tensor,
    scale: Tensor,
    spec: MXSpec,
    dtype: torch.dtype,
    length: int | None = None,
    tensor_scale: Tensor | None = None,
) -> tuple[MXSpec, int]:
    """Return the spec (axis counted from the front) and the length of the values that `data` and `scale` hold, from the
    arguments of `dequantize_mx`; raise `MXError` for those that do not fit each other."""
    if not (data.dim() and scale.dim()):
        raise MXError("data and scale have at least one dimension: a tensor without any has those of shape (1,)")
    if data.device != scale.device:
        raise MXError(f"data is on {data.device} and scale on {scale.device}: move one to the device of the other")
    spec = from_front(spec, data)
    stored = spec.scale_dtype
    if data.dtype != torch.uint8 or scale.dtype != stored:
        if spec.has_e8m0_scale:
            raise MXError(
                f"codes and scales are uint8, not {data.dtype} and {scale.dtype}: view them with .view(torch.uint8)"
            )
        raise MXError(
            f"codes of {spec} are {torch.uint8} and scales {stored}, not {data.dtype} and {scale.dtype}: pass what "
            "quantize_mx returns"
        )
    if tensor_scale is not None or spec.has_tensor_scale:
        check_tensor_scale(spec, tensor_scale, data, each=True)
    if dtype not in HIGH_PRECISION:
        raise MXError(f"cannot dequantize to {dtype}: allowed are float32, float16 and bfloat16")
    check_length(length)
    size, bits = data.shape[spec.axis], spec.element.bits
    length = unpacked_length(size, bits) if length is None else length
    if isinstance(size, int) and isinstance(length, int) and packed_length(length, bits) != size:
        raise MXError(
            f"data has {size} bytes along dimension {spec.axis}, but {length} codes of {spec.element} take "
            f"{packed_length(length, bits)}: pass the length that was quantized"
        )
    expected = spec.scale_shape(resized(data, spec.axis, length))
    concrete = {*map(type, (*expected, *scale.shape))} <= {int}  # symbolic sizes are checked when they run
    if concrete and tuple(scale.shape) != expected:
        raise MXError(
            f"scale of shape {tuple(scale.shape)} does not fit data of shape {tuple(data.shape)}: {length} values "
            f"of {spec.element} in blocks of {spec.blocks} along dimension {spec.axis} have {expected}"
        )
    return spec, length


def check_rotation(x: Tensor, size: int, axis: int = -1) -> None:
    """Raise `MXError` for arguments that `hadamard` does not take."""
    if x.dtype not in HIGH_PRECISION:
        raise MXError(f"hadamard takes float32, float16 or bfloat16, not {x.dtype}: cast x")
    if not -x.dim() <= axis < x.dim():
        raise MXError(f"axis={axis} is out of range for x of shape {tuple(x.shape)}")
    if size < 1 or size & (size - 1) or x.shape[axis] % size:
        raise MXError(
            f"blocks of {size} do not rotate {x.shape[axis]} values: the size must be a power of two that divides them"
        )


def check_operands(target_dtype: torch.dtype | None, **operands: Tensor) -> torch.dtype:
    """Return the dtype of a matmul's result; raise `MXError` for operands of several dtypes or devices."""
    first = next(iter(operands.values()))
    if not {first.dtype, target_dtype or first.dtype} <= set(HIGH_PRECISION):
        raise MXError(
            f"operands are {first.dtype} and target_dtype is {target_dtype}: both must be float32, float16 or bfloat16"
        )
    for name, tensor in operands.items():
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise MXError(
                f"{name} is {tensor.dtype} on {tensor.device} and {next(iter(operands))} {first.dtype} on "
                f"{first.device}: all must have one dtype and device"
            )
    return target_dtype or first.dtype


def check_one_device(args: Sequence[object]) -> None:
    """Raise `MXError` for arguments with tensors of several devices."""
    if len(devices := {arg.device for arg in args if isinstance(arg, Tensor)}) > 1:
        raise MXError(f"all tensors must be on one device, not on {' and '.join(sorted(map(str, devices)))}")


def check_target_dtype(target_dtype: torch.dtype | None, x: Tensor) -> torch.dtype:
    """Return the dtype of a result, by default x's; raise `MXError` for others than are allowed."""
    dtype = target_dtype or x.dtype
    if dtype not in HIGH_PRECISION:
        raise MXError(f"target_dtype={dtype} must be float32, float16 or bfloat16, or None for that of x")
    return dtype


def check_quantization(x: Tensor, spec: MXSpec, target_dtype: torch.dtype | None) -> tuple[MXSpec, torch.dtype]:
    """Return the spec and the dtype of values of x's shape that are quantized along the last dimension where they are
    computed; raise `MXError` for others than are allowed."""
    spec = check_input(x, spec)
    if ROUNDINGS[spec.rounding].random:
        raise MXError(f"values are not rounded {spec.rounding!r} where they are computed: use fake_quantize_mx of them")
    return spec, check_target_dtype(target_dtype, x) if target_dtype else x.dtype


def check_activation(activation: str) -> None:
    """Raise `MXError` for what is no activation."""
    if activation not in ACTIVATIONS:
        raise MXError(f"activation={activation!r} must be one of {', '.join(ACTIVATIONS)}")


def check_bias(bias: Tensor, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `MXError` for a bias that does not fit the rows of a weight and a result in `dtype` on a device."""
    if tuple(bias.shape) != (rows,) or bias.dtype != dtype or bias.device != device:
        raise MXError(
            f"bias of shape {tuple(bias.shape)}, {bias.dtype} on {bias.device} does not fit a weight of "
            f"{rows} rows and a result in {dtype} on {device}"
        )


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return False where a shape is known not to broadcast to one of as many dimensions. Symbolic sizes are checked
    when they run."""
    pairs = [(n, m) for n, m in zip(shape, to, strict=True) if isinstance(n, int) and isinstance(m, int)]
    return all(n in (1, m) for n, m in pairs)


def _is_count(n: object) -> bool:
    """True for an integer from 0 on that int64 holds."""
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63
