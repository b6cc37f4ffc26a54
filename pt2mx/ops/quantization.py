"""`quantize_mx`, `dequantize_mx`, `fake_quantize_mx`, and the operator of their gradients.

The schemas carry plain types, so that exported programs can hold them; `pt2mx.functional` takes formats in any
spelling. Results are dense and keep the input's dimension order (`pt2mx.ops.memory_format`). Codes and scales have the
order of their values, so that `fake_quantize_mx`, and `quantize_mx` then `dequantize_mx`, give the next operator the
same tensor.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels import reference_chunked
from pt2mx.kernels.float_scales import has_each
from pt2mx.kernels.packing import is_packed, new_size, packed_length, resized
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.arguments import (
    CODES,
    SCALES,
    VALUES,
    AnyScaleMode,
    Axis,
    Rounding,
    ScaleOfTensor,
    Seed,
    choices,
)
from pt2mx.ops.checks import STRAIGHT_THROUGH, check_input, check_packed, check_ste, check_tensor_scale
from pt2mx.ops.memory_format import as_tuple, empty_in_format_of, has_one_order, with_memory_format_of
from pt2mx.ops.operator import COMPLIANT, As, Format, Operator, T, operator
from pt2mx.ops.stochastic import seed_of
from pt2mx.ops.tensor_scale import TensorScale
from pt2mx.spec import MXSpec

#: the arguments of values and how they are quantized
_QUANTIZED = {**CODES, "axis": Axis, "scale_mode": AnyScaleMode, "rounding": Rounding}
#: the axis of codes, by its name in `dequantize_mx`
_BLOCK_DIM = {"axis": Annotated[int, As("block_dim"), "the axis"]}
#: attribute of codes: the tensor that was quantized, where it requires a gradient
_SOURCE = "_mx_source"


def _row(x: Tensor) -> Tensor:
    """Return x with a dimension at least: `torch.atleast_1d` without its three Python calls."""
    return x if x.dim() else x.unsqueeze(0)


def _run_in_order(call: Any, tensors: tuple[str, ...], spec: MXSpec, *more: object) -> tuple[Tensor, ...]:
    """Run the kernel of a call in the order in memory of its fields `tensors`, which have the same dimensions."""
    x = getattr(call, tensors[0])
    if has_one_order(x):
        return as_tuple(run_kernel(call, spec, *more))

    def kernel(spec: MXSpec, *given: Tensor) -> Any:
        in_order = call if given[0] is x else call.replace(**dict(zip(tensors, given, strict=True)))
        return run_kernel(in_order, spec, *more)

    return with_memory_format_of(x, kernel, spec, *(getattr(call, name) for name in tensors))


class Quantization(Operator[T]):
    """An operator that quantizes x along an axis."""

    __slots__ = ()
    #: True where the tensor scale of x, computed here, would be lost
    returns_scales: ClassVar[bool] = False
    x: T
    spec: MXSpec
    tensor_scale: T | None

    def check(self) -> MXSpec:
        """Return the spec, its axis counted from the front."""
        spec = check_input(self.x, self.spec)
        if self.tensor_scale is not None or (self.returns_scales and spec.has_tensor_scale):
            check_tensor_scale(spec, self.tensor_scale, self.x)
        return spec


def scale_of_tensor(call: Any, spec: MXSpec) -> Tensor:
    """Return the tensor scale of a call that quantizes x by a format with one: the given scale, or else x's own."""
    if call.tensor_scale is not None:
        return call.tensor_scale
    return TensorScale(call.x, spec).call()


def _for_kernel(call: Any, spec: MXSpec) -> Any:
    """Return a call that quantizes x with a dimension at least, the seed as a tensor, and the tensor scale of a format
    with one."""
    seed = seed_of(call.x, spec, call.seed)
    t = scale_of_tensor(call, spec) if spec.has_tensor_scale else None
    if call.x.dim() and seed is call.seed and t is call.tensor_scale:
        return call
    return call.replace(x=_row(call.x), seed=seed, tensor_scale=t)


@operator(
    "quantize_mx",
    3,
    {
        "scale": "(..., ceil(n / block_size), ...) in the dtype of the scale format; along the rows of a block "
        "ceil(rows / block_rows)",
        "data": "(..., bytes of n, ...) uint8, packed along the axis",
    },
    COMPLIANT,
)
class Quantize(Quantization[T]):
    """Codes and scales of values (OCP MX v1.0, section 6.3). A scalar counts as a tensor of shape (1,). The results
    have no gradient, but `dequantize_mx` of them passes its gradient straight through to `data_hp`.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0, 6.0])
        >>> torch.ops.pt2mx.quantize_mx(x, "fp4_e2m1", 32, -1, "floor", "even")
        (tensor([127], dtype=torch.uint8), tensor([ 66, 117], dtype=torch.uint8))
    """

    returns_scales = True
    x: Annotated[T, As("data_hp"), VALUES]
    spec: Annotated[MXSpec, Format(_QUANTIZED, {"seed": SCALES})]
    seed: Seed = None
    tensor_scale: ScaleOfTensor[T] = None

    def kernel(self) -> tuple[Tensor, ...]:
        spec = self.check()
        return _run_in_order(_for_kernel(self, spec), ("x",), spec)

    def define(self, spec: MXSpec) -> tuple[Tensor, Tensor]:
        return reference_chunked.quantize(self.x, spec, self.seed, self.tensor_scale)

    def fake(self) -> tuple[Tensor, Tensor]:
        spec, x = self.check(), _row(self.x)
        length, bits = x.shape[spec.axis], spec.element.bits
        scale_shape = resized(x, spec.axis, new_size(-(-length // spec.block_size), length))
        if spec.block_rows > 1:
            rows = spec.row_axis(x.dim())
            scale_shape[rows] = new_size(-(-x.shape[rows] // spec.block_rows), x.shape[rows])
        size = packed_length(length, bits)
        data_shape = resized(x, spec.axis, new_size(size, length) if is_packed(bits) else size)
        scale = empty_in_format_of(x, scale_shape, spec.scale_dtype)
        return scale, empty_in_format_of(x, data_shape, torch.uint8)

    def remember(self, ctx: Any, outputs: tuple[Tensor, Tensor]) -> None:
        """Codes are integers, through which autograd takes no gradient. So the codes of a tensor that requires one
        remember the tensor, and what dequantizes them passes its gradient on to it. Without this the gradient of a
        converted model would lack every branch that is quantized, silently."""
        setattr(outputs[1], _SOURCE, self.x)

    def backward(self, ctx: Any, *grads: Tensor) -> dict[str, Tensor | None]:
        return {}  # the outputs are integers


@operator("dequantize_mx", 3, "(..., n, ...) in `target_dtype`", COMPLIANT)
class Dequantize(Operator[T]):
    """The values of codes: in float32, exact for E8M0 scales, then cast with ties to even. The codes of E matrices may
    have `tensor_scale` (E,).

    Example:
        >>> data, scale = torch.tensor([66, 117], dtype=torch.uint8), torch.tensor([128], dtype=torch.uint8)
        >>> torch.ops.pt2mx.dequantize_mx(data, scale, "fp4_e2m1", 32, torch.float32, -1)
        tensor([ 2.,  4.,  6., 12.])
    """

    codes: Annotated[T, As("data_lp"), "(..., bytes of n, ...) uint8, as `quantize_mx` gives it"]
    scale: Annotated[T, As("shared_exp_e8m0"), "as `quantize_mx` gives it"]
    spec: Annotated[MXSpec, Format(CODES, {"dtype": _BLOCK_DIM, "length": SCALES})]
    dtype: Annotated[torch.dtype, As("target_dtype"), "float32, float16 or bfloat16"]
    length: Annotated[
        Any, As(type="SymInt?"), "n, where packing rounded it up; None means every code that the bytes hold"
    ] = None
    tensor_scale: ScaleOfTensor[T] = None

    def check(self) -> tuple[MXSpec, int]:
        """Return the spec, its axis counted from the front, and n."""
        return check_packed(self.codes, self.scale, self.spec, self.dtype, self.length, self.tensor_scale)

    def kernel(self) -> Tensor:
        spec, length = self.check()
        if self.tensor_scale is not None and has_each(self.tensor_scale):
            y = self.fake()
            for out, codes, scale, t in zip(y, self.codes, self.scale, self.tensor_scale, strict=True):
                matrix = spec.replace(axis=spec.axis - 1)
                out.copy_(self.replace(codes=codes, scale=scale, spec=matrix, tensor_scale=t).kernel())
            return y
        return _run_in_order(self, ("codes", "scale"), spec, length)[0]

    def define(self, spec: MXSpec, length: int) -> Tensor:
        return reference_chunked.dequantize(self.codes, self.scale, spec, self.dtype, length, self.tensor_scale)

    def fake(self) -> Tensor:
        spec, length = self.check()
        return empty_in_format_of(self.codes, resized(self.codes, spec.axis, length), self.dtype)


class _StraightThrough(torch.autograd.Function):
    """values, source -> values; the source gets the gradient of the values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, source: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = source.shape, source.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.reshape(ctx.shape).to(ctx.dtype)


@torch.library.impl("pt2mx::dequantize_mx", "Autograd")
def _straight_through(codes: Tensor, *args: Any) -> Tensor:
    """Return the values of codes, whose gradient goes to the tensor that was quantized."""
    with torch._C._AutoDispatchBelowAutograd():
        values = Dequantize.overload(codes, *args)
    source = getattr(codes, _SOURCE, None)
    if source is None or not torch.is_grad_enabled():
        return values
    if values.numel() != source.numel():
        raise MXError(
            f"dequantize_mx gives {values.numel()} values of codes that hold {source.numel()}, and cannot pass "
            "their gradient on: pass the length that was quantized"
        )
    return _StraightThrough.apply(values, source)


@operator("fake_quantize_mx", 3, "x's shape and dtype", COMPLIANT)
class FakeQuantize(Quantization[T]):
    """`dequantize_mx` of `quantize_mx`, to the bit, in x's dtype. The gradient is a straight-through estimator.

    Example:
        >>> x = torch.tensor([1.1, 2.0, 3.3, 6.0])
        >>> torch.ops.pt2mx.fake_quantize_mx(x, "fp4_e2m1", 32, -1, "floor", "even", None, "identity")
        tensor([1., 2., 3., 6.])
    """

    x: Annotated[T, VALUES]
    spec: Annotated[MXSpec, Format(_QUANTIZED, {"ste": SCALES})]
    seed: Seed
    ste: Annotated[
        str, f"{choices(STRAIGHT_THROUGH)}: the gradient passes, or is zero beyond the largest value of a scale"
    ]
    tensor_scale: ScaleOfTensor[T] = None

    def check(self) -> MXSpec:
        check_ste(self.ste)
        return Quantization.check(self)

    def kernel(self) -> Tensor:
        spec = self.check()
        (y,) = _run_in_order(_for_kernel(self, spec), ("x",), spec)
        return y if self.x.dim() else y.as_strided_((), ())

    def define(self, spec: MXSpec) -> Tensor:
        return reference_chunked.fake_quantize(self.x, spec, self.seed, self.tensor_scale)

    def fake(self) -> Tensor:
        self.check()
        return empty_in_format_of(self.x, self.x.shape, self.x.dtype)

    def saved(self) -> tuple[str, ...]:
        return ("x", "tensor_scale") if self.ste == "clipped" else ()

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        if self.ste == "identity":
            return {"x": grad}
        return {"x": ClipGradient(grad, self.x, self.spec, self.tensor_scale).call()}


@operator(
    "clip_gradient_mx",
    3,
    "grad's dtype: grad, and zero where x is beyond the largest value of its block's scale",
    COMPLIANT,
    saved=("x", "tensor_scale"),
)
class ClipGradient(Operator[T]):
    """The gradient of `fake_quantize_mx` with `clipped`.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0, 7.0])
        >>> torch.ops.pt2mx.clip_gradient_mx(torch.ones(4), x, "fp4_e2m1", 32, -1, "floor", "even")
        tensor([1., 1., 1., 0.])
    """

    grad: Annotated[T, "x's shape, on x's device, floating-point"]
    x: Annotated[T, VALUES]
    spec: Annotated[MXSpec, Format(_QUANTIZED, {"spec": SCALES})]
    tensor_scale: ScaleOfTensor[T] = None

    def check(self) -> MXSpec:
        spec = check_input(self.x, self.spec)
        check_tensor_scale(spec, self.tensor_scale, self.x, required=False)
        return spec

    def kernel(self) -> Tensor:
        spec, x, grad = self.check(), self.x, self.grad
        if grad.shape != x.shape or grad.device != x.device or not grad.is_floating_point():
            raise MXError(
                f"grad of shape {tuple(grad.shape)}, {grad.dtype} on {grad.device} is no gradient of x of shape "
                f"{tuple(x.shape)} on {x.device}"
            )
        t = scale_of_tensor(self, spec) if spec.has_tensor_scale else None
        is_ready = bool(x.dim()) and t is self.tensor_scale
        call = self if is_ready else self.replace(grad=_row(grad), x=_row(x), tensor_scale=t)
        (y,) = _run_in_order(call, ("x", "grad"), spec)
        return y if x.dim() else y.as_strided_((), ())

    def define(self, spec: MXSpec) -> Tensor:
        return reference_chunked.clip_gradient(self.grad, self.x, spec, self.tensor_scale)

    def fake(self) -> Tensor:
        self.check()
        return empty_in_format_of(self.x, self.x.shape, self.grad.dtype)

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        """Clipping is linear in the gradient that it clips."""
        return {"grad": self.replace(grad=grad).call()}


quantize_mx = Quantize.overload
dequantize_mx = Dequantize.overload
fake_quantize_mx = FakeQuantize.overload
clip_gradient_mx = ClipGradient.overload
