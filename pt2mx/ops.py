"""The operators `torch.ops.pt2mx.*`: schemas, checks, kernels, fake kernels and gradients. Design: operators.

The schemas carry plain types, so that exported programs can hold them; `pt2mx.functional` is their friendlier face.
Outputs are contiguous whatever the strides of the input: codes know nothing of strides, and the two ways to the same
values (`fake_quantize_mx`, and `quantize_mx` then `dequantize_mx`) must give the next operator the same tensor.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from pt2mx.errors import MXError
from pt2mx.formats import MXSpec
from pt2mx.kernels import reference
from pt2mx.kernels.chunks import by_chunks
from pt2mx.kernels.packing import is_packed, packed_length, unpacked_length

#: dtypes that can be quantized, and dequantized to
HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)

_MODES = 'str elem_dtype_name, int block_size, int axis=-1, str scale_mode="floor", str rounding="even"'

_make_spec = functools.lru_cache(maxsize=1024)(MXSpec)


def check_input(x: Tensor, *modes: object) -> MXSpec:
    """The spec that the operator arguments `modes` (element name, block size, axis, scale mode, rounding) name, its
    axis counted from the front; `MXError` where they or x's dtype are not allowed."""
    if x.dtype not in HIGH_PRECISION:
        raise MXError(
            f"cannot quantize a tensor of dtype {x.dtype} to an MX format: allowed are float32, float16 and bfloat16; "
            "cast it first, for example with x.float()"
        )
    spec = _make_spec(*modes)
    return spec.replace(axis=_dimension(spec.axis, x))


def operator_modes(spec: MXSpec) -> tuple[str, int, int, str, str]:
    """The arguments by which the operators take `spec`."""
    return spec.element.name, spec.block_size, spec.axis, spec.scale_mode, spec.rounding


def check_packed(
    data: Tensor,
    scale: Tensor,
    elem: str,
    block_size: int,
    dtype: torch.dtype,
    axis: int = -1,
    length: int | None = None,
) -> tuple[MXSpec, int]:
    """Spec (axis counted from the front) and length of the values that `data` and `scale` hold, from the arguments of
    `dequantize_mx`; `MXError` where they do not fit each other."""
    spec = _make_spec(elem, block_size, axis)
    spec = spec.replace(axis=_dimension(axis, data))
    if data.dtype != torch.uint8 or scale.dtype != torch.uint8:
        raise MXError(
            f"codes and scales are uint8, not {data.dtype} and {scale.dtype}: view them with .view(torch.uint8)"
        )
    if dtype not in HIGH_PRECISION:
        raise MXError(f"cannot dequantize to {dtype}: allowed are float32, float16 and bfloat16")
    size, bits = data.shape[spec.axis], spec.element.bits
    length = unpacked_length(size, bits) if length is None else length
    if isinstance(size, int) and isinstance(length, int) and packed_length(length, bits) != size:
        raise MXError(
            f"data has {size} bytes along dimension {spec.axis}, but {length} codes of {spec.element} take "
            f"{packed_length(length, bits)}: pass the length that was quantized"
        )
    expected = _resized(data, spec.axis, -(-length // block_size))
    concrete = all(isinstance(n, int) for n in (*expected, *scale.shape))  # symbolic sizes are checked when they run
    if concrete and list(scale.shape) != expected:
        raise MXError(
            f"scale of shape {tuple(scale.shape)} does not fit data of shape {tuple(data.shape)}: {length} values "
            f"of {spec.element} in blocks of {block_size} along dimension {spec.axis} have {tuple(expected)}"
        )
    return spec, length


def _dimension(axis: int, x: Tensor) -> int:
    rank = max(x.dim(), 1)  # a 0-d tensor is quantized as one of shape (1,)
    if not -rank <= axis < rank:
        raise MXError(f"axis={axis} is out of range for shape {tuple(x.shape)}: allowed are {-rank} to {rank - 1}")
    return axis % rank


def _resized(x: Tensor, axis: int, size: int) -> list[int]:
    return [*x.shape[:axis], size, *x.shape[axis + 1 :]]


def _quantize(x: Tensor, *modes: object) -> tuple[Tensor, Tensor]:
    spec = check_input(x, *modes)
    return by_chunks(lambda x: reference.quantize(x, spec), spec.axis, torch.atleast_1d(x))


def _quantize_fake(x: Tensor, *modes: object) -> tuple[Tensor, Tensor]:
    spec = check_input(x, *modes)
    x = torch.atleast_1d(x)
    length, bits = x.shape[spec.axis], spec.element.bits
    scale_shape = _resized(x, spec.axis, _quotient(-(-length // spec.block_size), length))
    data_shape = _resized(x, spec.axis, _quotient(packed_length(length, bits), length) if is_packed(bits) else length)
    return x.new_empty(scale_shape, dtype=torch.uint8), x.new_empty(data_shape, dtype=torch.uint8)


def _quotient(size: int, length: int) -> int:
    """`size`, a quotient of the symbolic `length`, as a size of its own.

    Tracing asks of every size whether it is 1. Of a quotient that is a guard on `length` ("at most one block"), and
    exporting with a dynamic length would fail. torch.compile, which may guard, refuses new sizes.
    """
    if isinstance(length, int):
        return size
    try:
        return torch.library.get_ctx().new_dynamic_size()
    except DynamicOutputShapeException:
        return size


def _dequantize(data: Tensor, scale: Tensor, elem: str, block_size: int, dtype: torch.dtype, *where: object) -> Tensor:
    spec, length = check_packed(data, scale, elem, block_size, dtype, *where)

    def kernel(data: Tensor, scale: Tensor) -> tuple[Tensor]:
        return (reference.dequantize(data, scale, spec, dtype, length),)

    return by_chunks(kernel, spec.axis, data, scale)[0]


def _dequantize_fake(
    data: Tensor, scale: Tensor, elem: str, block_size: int, dtype: torch.dtype, *where: object
) -> Tensor:
    spec, length = check_packed(data, scale, elem, block_size, dtype, *where)
    return data.new_empty(_resized(data, spec.axis, length), dtype=dtype)


def _fake_quantize(x: Tensor, *modes: object) -> Tensor:
    spec = check_input(x, *modes)
    (y,) = by_chunks(lambda x: (reference.fake_quantize(x, spec),), spec.axis, torch.atleast_1d(x))
    return y if x.dim() else y.reshape(()).clone()  # an operator's output is no view


def _fake_quantize_fake(x: Tensor, *modes: object) -> Tensor:
    check_input(x, *modes)
    return x.new_empty(x.shape)


def _straight_through(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (grad, None, None, None, None, None)


def _no_gradient(ctx: object, *grads: Tensor) -> tuple[None, ...]:
    """Codes are integers: as with `tensor.to(torch.uint8)`, no gradient passes."""
    return (None,) * 6


#: operator -> (schema, kernel for every device, fake kernel, backward)
_OPERATORS = {
    "quantize_mx": (
        f"(Tensor data_hp, {_MODES}) -> (Tensor scale, Tensor data)",
        _quantize,
        _quantize_fake,
        _no_gradient,
    ),
    "dequantize_mx": (
        "(Tensor data_lp, Tensor shared_exp_e8m0, str elem_dtype_name, int block_size, ScalarType target_dtype, "
        "int block_dim=-1, SymInt? length=None) -> Tensor",
        _dequantize,
        _dequantize_fake,
        None,
    ),
    "fake_quantize_mx": (
        f"(Tensor x, {_MODES}) -> Tensor",
        _fake_quantize,
        _fake_quantize_fake,
        _straight_through,
    ),
}

for _name, (_schema, _kernel, _fake, _backward) in _OPERATORS.items():
    _qualified = f"pt2mx::{_name}"
    torch.library.define(_qualified, _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(_qualified, "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(_qualified, _fake)
    if _backward is not None:
        torch.library.register_autograd(_qualified, _backward)

quantize_mx = torch.ops.pt2mx.quantize_mx.default
dequantize_mx = torch.ops.pt2mx.dequantize_mx.default
fake_quantize_mx = torch.ops.pt2mx.fake_quantize_mx.default
