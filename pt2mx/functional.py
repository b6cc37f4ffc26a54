"""The functions of the public API: the operators of `pt2mx.ops`, taking formats in any spelling.

Where `elem_dtype` is an `MXSpec` or a spelling with a block size (`"MXFP4[E2M1]{32}"`), it sets the other arguments;
an argument that is passed too wins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pt2mx.errors import MXError
from pt2mx.formats import parse_element
from pt2mx.kernels import reference_chunked
from pt2mx.ops.checks import check_input, check_length, check_seed, check_ste, check_tensor_scale, check_tensors
from pt2mx.ops.memory_format import with_memory_format_of
from pt2mx.ops.quantization import Dequantize, FakeQuantize, Quantize
from pt2mx.ops.stochastic import seed_of
from pt2mx.ops.tensor_scale import TensorScale
from pt2mx.scale_formats import parse_scale_format
from pt2mx.spec import MXSpec, parse


def quantize_mx(
    x: Tensor,
    elem_dtype: object,
    block_size: int | None = None,
    axis: int | None = None,
    scale_mode: str | None = None,
    rounding: str | None = None,
    seed: int | torch.Generator | None = None,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize to an MX format (OCP MX v1.0, section 6.3), or to one with other scales.

    Args:
        x: (..., n, ...) float32, float16 or bfloat16; blocks run along `axis`, the last may be shorter.
        elem_dtype: the element format, as `pt2mx.parse` takes it.
        block_size: values that share a scale; by default 32.
        axis: the dimension along which blocks run; by default -1.
        scale_mode: how the shared exponent follows from the block's values; by default "floor".
        rounding: how values are rounded to the element's grid; by default "even".
        seed: of `rounding="stochastic"`: 0 to 2**63 - 1, the same numbers on every device; a generator, from which a
            seed is drawn; or None, for another draw each call.
        tensor_scale: () float32, of formats with a scale a tensor (`"nvfp4"`), as `tensor_scale_mx` gives it.

    Returns:
        scale: (..., ceil(n / block_size), ...) uint8, E8M0; `.view(torch.float8_e8m0fnu)` reads it. 0xFF marks a block
            with an Inf or a NaN; it dequantizes to NaN. Other scale formats have their own dtype and NaN; `block_rows`
            rows share a scale.
        data: (..., bytes, ...) uint8: n bytes for 8-bit elements, ceil(n / 2) for FP4, 3 * ceil(n / 4) for FP6, 2 * n
            for elements of more than 8 bits. Both are integers, and have no gradient.

    Raises:
        MXError: for another dtype, an unknown format or mode, a block size below 1, an axis out of range, a tensor
            scale that the format lacks, or none where it has one.

    Example:
        >>> import torch, pt2mx
        >>> scale, data = pt2mx.quantize_mx(torch.tensor([1.0, 2.0, 3.0, 6.0]), "mxfp4")
        >>> scale  # 2**(127 - 127)
        tensor([127], dtype=torch.uint8)
        >>> data  # two codes a byte, the first in the low bits
        tensor([ 66, 117], dtype=torch.uint8)
    """
    check_tensors(x=x)
    spec = _spec(elem_dtype, block_size=block_size, axis=axis, scale_mode=scale_mode, rounding=rounding)
    _check_tensor_scale(tensor_scale, spec, x)
    return Quantize(x.detach(), spec, _seed(seed), tensor_scale).call()


def dequantize_mx(
    data: Tensor,
    scale: Tensor,
    elem_dtype: object,
    block_size: int | None = None,
    target_dtype: torch.dtype = torch.float32,
    axis: int | None = None,
    length: int | None = None,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """Return the values of MX codes (OCP MX v1.0, section 5.1): exact in fp32, then cast with ties to even.

    Args:
        data: codes as `quantize_mx` returns them, or viewed in torch's own dtype of the element.
        scale: scales as `quantize_mx` returns them, or viewed in torch's own dtype of the scale format.
        elem_dtype: the element format, as `pt2mx.parse` takes it.
        block_size: values that share a scale, as they were quantized; by default 32.
        target_dtype: float32, float16 or bfloat16.
        axis: the dimension along which blocks run, as they were quantized; by default -1.
        length: n, where packing rounded it up (an odd n in FP4, an n that 4 does not divide in FP6).
        tensor_scale: as they were quantized; of codes of E matrices also (E,), one of each.

    Returns:
        (..., length, ...) `target_dtype`.

    Raises:
        MXError: for shapes that do not fit each other, or other dtypes.

    Example:
        >>> import torch, pt2mx
        >>> scale, data = pt2mx.quantize_mx(torch.tensor([0.3, 1.0, 2.9, -8.0]), "mxfp4")
        >>> pt2mx.dequantize_mx(data, scale, "mxfp4")
        tensor([ 0.,  1.,  3., -8.])
    """
    spec = _spec(elem_dtype, block_size=block_size, axis=axis)
    check_tensors(data=data, scale=scale)
    if not isinstance(target_dtype, torch.dtype):
        raise MXError(f"target_dtype must be torch.float32, float16 or bfloat16, not {target_dtype!r}")
    check_length(length)
    if data.dtype in _VIEWS and parse_element(data.dtype) == spec.element:
        data = data.view(torch.uint8)
    if scale.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn) and (
        parse_scale_format(scale.dtype).grid == spec.scale_format.grid
    ):
        scale = scale.view(torch.uint8)
    if tensor_scale is not None:
        check_tensors(tensor_scale=tensor_scale)
    return Dequantize(data, scale, spec, target_dtype, length, tensor_scale).call()


def tensor_scale_mx(x: Tensor, elem_dtype: object, scale_mode: str | None = None) -> Tensor:
    """Return the scale of a whole tensor, of formats that have one (`"nvfp4"`).

    Args:
        x: float32, float16 or bfloat16, of any shape.
        elem_dtype: the format, as `pt2mx.parse` takes it.
        scale_mode: as in `quantize_mx`.

    Returns:
        () float32: with it the largest block has the largest scale. Inf and NaN do not count; 1 for a tensor of zeros.

    Raises:
        MXError: for another dtype, and a format without a tensor scale.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.tensor([0.5, 2688.0, -1.0])  # 6 * 448
        >>> tensor_scale = pt2mx.tensor_scale_mx(x, "nvfp4")
        >>> tensor_scale
        tensor(1.)
        >>> pt2mx.quantize_mx(x, "nvfp4", tensor_scale=tensor_scale)[0].view(torch.float8_e4m3fn).float()
        tensor([448.])
    """
    check_tensors(x=x)
    spec = _spec(elem_dtype, scale_mode=scale_mode)
    if not spec.has_tensor_scale:
        raise MXError(f"{spec} has no tensor scale: {spec.scale_format} scales are all that it has")
    return TensorScale(x.detach(), spec).call()


def fake_quantize_mx(
    x: Tensor,
    elem_dtype: object,
    block_size: int | None = None,
    axis: int | None = None,
    scale_mode: str | None = None,
    rounding: str | None = None,
    seed: int | torch.Generator | None = None,
    ste: str = "identity",
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """Return `dequantize_mx(quantize_mx(x))` to the bit, in x's dtype, without the codes.

    Its gradient is the straight-through estimator (Bengio et al., arXiv:1308.3432), in forward mode (`torch.func.jvp`)
    with `ste="identity"` alone.

    Args:
        x: (..., n, ...) float32, float16 or bfloat16; blocks run along `axis`, the last may be shorter.
        elem_dtype: the element format, as `pt2mx.parse` takes it; a spec may also have another scale than E8M0.
        block_size: values that share a scale; by default 32.
        axis: the dimension along which blocks run; by default -1.
        scale_mode: how the shared exponent follows from the block's values; by default "floor".
        rounding: how values are rounded to the element's grid; by default "even".
        seed: as in `quantize_mx`.
        ste: the gradient: `"identity"` passes it unchanged, `"clipped"` makes it zero where x is beyond the largest
            value of its block's scale.
        tensor_scale: as in `quantize_mx`; by default `tensor_scale_mx(x)`. It gets no gradient.

    Returns:
        (..., n, ...) in x's dtype.

    Raises:
        MXError: for another dtype, an unknown format, mode or `ste`, a block size below 1, an axis out of range, and a
            derivative in forward mode with another `ste`.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.tensor([0.3, 1.0, 2.9, -7.0], requires_grad=True)
        >>> y = pt2mx.fake_quantize_mx(x, "mxfp4", ste="clipped")
        >>> y.detach()
        tensor([ 0.5000,  1.0000,  3.0000, -6.0000])
        >>> y.sum().backward()
        >>> x.grad
        tensor([1., 1., 1., 0.])
    """
    check_tensors(x=x)
    check_ste(ste)
    spec = _spec(elem_dtype, block_size=block_size, axis=axis, scale_mode=scale_mode, rounding=rounding)
    _check_tensor_scale(tensor_scale, spec, x)
    # torch drops the tangent of an operator without a rule of its own
    primal, tangent = forward_ad.unpack_dual(x) if forward_ad._current_level >= 0 else (x, None)
    if tangent is not None:
        if ste != "identity":
            raise MXError(f"ste={ste!r} has no forward-mode derivative: choose ste='identity', or call backward()")
        y = fake_quantize_mx(primal, spec, seed=seed, tensor_scale=tensor_scale)
        return forward_ad.make_dual(y, tangent)
    if not spec.has_operators:
        return _OtherWidth.apply(x, check_input(x, spec), _seed(seed), ste)
    return FakeQuantize(x, spec, _seed(seed), ste, tensor_scale).call()


class _OtherWidth(torch.autograd.Function):
    """`fake_quantize_mx` by the reference kernel, of scales that are powers of two of another width than E8M0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: MXSpec, seed: int | None, ste: str) -> Tensor:
        ctx.save_for_backward(*([x] if ste == "clipped" else []))
        ctx.spec, row = spec, torch.atleast_1d(x)
        seed_tensor = seed_of(x, spec, seed)

        def kernel(spec: MXSpec, row: Tensor) -> Tensor:
            return reference_chunked.fake_quantize(row, spec, seed_tensor)

        (y,) = with_memory_format_of(row, kernel, spec, row)
        return y if x.dim() else y.as_strided_((), ())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        def kernel(spec: MXSpec, row: Tensor, grad: Tensor) -> Tensor:
            return reference_chunked.clip_gradient(grad, row, spec)

        for x in ctx.saved_tensors:
            row = torch.atleast_1d(x)
            (grad,) = with_memory_format_of(row, kernel, ctx.spec, row, torch.atleast_1d(grad))
            grad = grad if x.dim() else grad.as_strided_((), ())
        return grad, None, None, None


def _check_tensor_scale(tensor_scale: Tensor | None, spec: MXSpec, x: Tensor) -> None:
    if tensor_scale is not None:
        check_tensors(tensor_scale=tensor_scale)
        check_tensor_scale(spec, tensor_scale, x)


#: dtypes as which the codes of their own element format can be viewed
_VIEWS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2, torch.int8)


def _spec(elem_dtype: object, **fields: Any) -> MXSpec:
    given = {name: value for name, value in fields.items() if value is not None}
    return elem_dtype if isinstance(elem_dtype, MXSpec) and not given else parse(elem_dtype, **given)


def _seed(seed: int | torch.Generator | None) -> int | None:
    if isinstance(seed, torch.Generator):
        return int(torch.randint(2**63 - 1, (), generator=seed, device=seed.device))
    check_seed(seed)
    return seed
