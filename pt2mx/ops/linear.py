"""`linear_mx`, `grouped_linear_mx`, `linear_mx_mma_layout`: linear layers whose weights stay packed.

They compute what `linear(x, dequantize_mx(weight))` does, with float32 sums in another order, and are what the lowered
program calls (`pt2mx.fx.lower`). Where no kernel of `pt2mx.kernels.select` supports a call, the weight is dequantized:
for large batches, where the matmul takes most of the time anyway, and on devices without kernels.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.errors import MXError
from pt2mx.formats import ELEMENTS
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, from_mma_layout
from pt2mx.kernels.hadamard import rotate_back
from pt2mx.ops.arguments import (
    CODES,
    SCALES,
    WEIGHT_CODES,
    WEIGHT_SCALE,
    Element,
    Rotation,
    ScaleOfTensor,
    TargetDtype,
    choices,
)
from pt2mx.ops.checks import check_bias, check_packed, check_rotation, check_target_dtype
from pt2mx.ops.hadamard import hadamard
from pt2mx.ops.operator import As, Autocast, Format, Operator, T, operator
from pt2mx.ops.quantization import Dequantize
from pt2mx.spec import MXSpec


def check_weight(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    spec: MXSpec,
    dimensions: int,
    tensor_scale: Tensor | None = None,
) -> MXSpec:
    """Return the spec of a weight that is multiplied with x: (..., K); MXError for what does not fit."""
    if not x.dim() or codes.dim() != dimensions:
        raise MXError(
            f"x of shape {tuple(x.shape)} and a weight of {codes.dim()} dimensions, not (..., K) and {dimensions}"
        )
    if x.device != codes.device:
        raise MXError(f"x is on {x.device} and the weight on {codes.device}: move one to the device of the other")
    try:
        return check_packed(codes, scale, spec, x.dtype, x.shape[-1], tensor_scale)[0]
    except MXError as error:
        raise MXError(f"x of shape {tuple(x.shape)} times a weight of {tuple(codes.shape)} bytes: {error}") from None


class PackedMatmul(Operator[T]):
    """A matmul of x with a weight that is packed along the dimension that the matmul reduces."""

    __slots__ = ()
    codes: T
    scale: T
    spec: MXSpec
    tensor_scale: T | None

    def dequantization(self, dtype: torch.dtype, length: int) -> Dequantize[T]:
        """Return the call that dequantizes the weight, with `length` values along its last dimension."""
        return Dequantize(self.codes, self.scale, self.spec, dtype, length, self.tensor_scale)

    def weight(self, dtype: torch.dtype, length: int) -> Tensor:
        """Return the dequantized weight, with `length` values along its last dimension."""
        return self.dequantization(dtype, length).call()


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Compute `torch._grouped_mm` by operators that torch can trace. Torch's own operator runs only for bfloat16 with
    rows of whole 16 bytes; otherwise each expert multiplies all rows. x: (T, K), weight: (E, K, N), offs: (E,) int32 ->
    (T, N)."""
    if x.dtype == torch.bfloat16 and weight.shape[1] % 8 == weight.shape[2] % 8 == 0:
        return torch._grouped_mm(x, weight, offs=offs)
    return matmul_of_each(x, weight, offs)


def matmul_of_each(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Compute `torch._grouped_mm` by core operators: each expert multiplies all rows. Shapes are as above."""
    row = torch.arange(x.shape[0], device=x.device)
    expert = (row.unsqueeze(1) >= offs).sum(1)  # (T,)
    y = x.new_zeros(x.shape[0], weight.shape[2])
    for i, each in enumerate(weight.unbind()):
        y = torch.where((expert == i).unsqueeze(-1), x @ each, y)
    return y


@operator(
    "linear_mx",
    5,
    "(..., N) in `target_dtype`",
    autocast=Autocast(("x", "bias", "target_dtype")),
    saved=("codes", "scale", "tensor_scale"),
)
class LinearMX(PackedMatmul[T]):
    """`linear(x, w, bias)`, where w is `dequantize_mx` of the weight along K in the dtype of the result; sums are in
    float32, in any order. If that dtype does not hold the values of w, such as those with a tensor scale in bfloat16, a
    kernel may multiply them unrounded. x and bias have gradients; autocast casts both to its dtype.

    Example:
        >>> scale, data = pt2mx.quantize_mx(torch.eye(4), "mxfp4")
        >>> torch.ops.pt2mx.linear_mx(torch.arange(4.0), data, scale, None, "fp4_e2m1", 32, 0)
        tensor([0., 1., 2., 3.])
    """

    x: Annotated[T, "(..., K) float32, float16 or bfloat16"]
    codes: Annotated[T, As("weight_data"), WEIGHT_CODES]
    scale: Annotated[T, As("weight_scale"), WEIGHT_SCALE]
    bias: Annotated[T | None, "(N,) in the dtype of the result, or None"]
    spec: Annotated[MXSpec, Format(CODES, {"target_dtype": SCALES})]
    rotation: Rotation
    target_dtype: Annotated[
        TargetDtype,
        "the dtype of the result; None: that of x. float32 of quantized values in bfloat16, which holds them exactly, "
        "runs on bfloat16 matrix units",
    ] = None
    tensor_scale: ScaleOfTensor[T] = None

    def check(self) -> tuple[MXSpec, torch.dtype]:
        spec = check_weight(self.x, self.codes, self.scale, self.spec, 2, self.tensor_scale)
        if self.rotation:
            check_rotation(self.x, self.rotation)
        dtype = check_target_dtype(self.target_dtype, self.x)
        if self.bias is not None:
            check_bias(self.bias, self.codes.shape[0], dtype, self.x.device)
        return spec, dtype

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.codes.shape[0])

    def decompose(self) -> Tensor:
        x = hadamard(self.x, self.rotation, -1) if self.rotation else self.x
        x = x.to(self.result_dtype)
        return functional.linear(x, self.weight(x.dtype, x.shape[-1]), self.bias)

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        x = grad @ self.weight(grad.dtype, ctx.shape[-1])
        x = rotate_back(x, self.rotation) if self.rotation else x
        return {"x": x.to(ctx.dtype), "bias": grad.flatten(0, -2).sum(0) if "bias" in ctx.needs else None}


@operator("grouped_linear_mx", 3, "(T, N) in `target_dtype`", saved=("codes", "scale", "offs", "tensor_scale"))
class GroupedLinearMX(PackedMatmul[T]):
    """`linear_mx` of rows that are sorted by expert, each with the weight of its expert, as `torch._grouped_mm`; rows
    past the last offset are undefined. `tensor_scale` may be (E,), one for each expert. x has a gradient.

    Example:
        >>> scale, data = pt2mx.quantize_mx(torch.stack([torch.eye(4), 2 * torch.eye(4)]), "mxfp4")
        >>> ends = torch.tensor([1, 2], dtype=torch.int32)
        >>> torch.ops.pt2mx.grouped_linear_mx(torch.ones(2, 4), data, scale, ends, "fp4_e2m1", 32)
        tensor([[1., 1., 1., 1.],
                [2., 2., 2., 2.]])
    """

    x: Annotated[T, "(T, K) float32, float16 or bfloat16"]
    codes: Annotated[T, As("weight_data"), "(E, N, bytes of K) uint8, packed along K, which is the axis"]
    scale: Annotated[T, As("weight_scale"), "(E, N, ceil(K / block_size)), as `quantize_mx` gives it"]
    offs: Annotated[T, "(E,) int32: for each expert the row after its last"]
    spec: Annotated[MXSpec, Format(CODES, {"target_dtype": SCALES})]
    target_dtype: Annotated[TargetDtype, "as of `linear_mx`"] = None
    tensor_scale: ScaleOfTensor[T] = None

    def check(self) -> tuple[MXSpec, torch.dtype]:
        x, offs = self.x, self.offs
        spec = check_weight(x, self.codes, self.scale, self.spec, 3, self.tensor_scale)
        if x.dim() != 2 or offs.shape != self.codes.shape[:1] or offs.dtype != torch.int32 or offs.device != x.device:
            raise MXError(
                f"x must be (T, K) and offs ({self.codes.shape[0]},) int32 on {x.device}, an end for each expert; got "
                f"{tuple(x.shape)} and {tuple(offs.shape)} {offs.dtype} on {offs.device}"
            )
        return spec, check_target_dtype(self.target_dtype, x)

    def define(self, spec: MXSpec, dtype: torch.dtype) -> Tensor:
        weight = self.weight(dtype, self.x.shape[-1])  # (E, N, K)
        return torch._grouped_mm(self.x.to(dtype), weight.mT, offs=self.offs)

    def of_expert(self, expert: int, x: Tensor, dtype: torch.dtype) -> LinearMX[Tensor]:
        """Return the call of `linear_mx` for the rows of an expert, with a result in `dtype`."""
        t = None if self.tensor_scale is None else self.tensor_scale.expand(len(self.codes))[expert]
        return LinearMX(x, self.codes[expert], self.scale[expert], None, self.spec, 0, dtype, t)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (self.x.shape[0], self.codes.shape[1])

    def decompose(self) -> Tensor:
        x = self.x.to(self.result_dtype)
        return grouped_mm(x, self.weight(x.dtype, x.shape[-1]).mT, self.offs)

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        x = grouped_mm(grad.contiguous(), self.weight(grad.dtype, ctx.shape[-1]), self.offs).to(ctx.dtype)
        has_expert = (torch.arange(len(x), device=x.device).unsqueeze(1) < self.offs).any(1, keepdim=True)
        return {"x": torch.where(has_expert, x, 0)}  # what others have is undefined


@operator(
    "linear_mx_mma_layout",
    4,
    "(..., n) bfloat16",
    autocast=Autocast(("x", "bias"), computes_in=torch.bfloat16),
)
class LinearMXMMALayout(Operator[T]):
    """`linear_mx` with the weight in the order of an NVIDIA GPU's tensor cores. Only programs that were lowered for
    such a GPU hold it.

    Example:
        >>> from pt2mx.kernels.gpu.mma_layout import to_mma_layout
        >>> scale, data = pt2mx.quantize_mx(torch.eye(64), "mxfp4")
        >>> weight = to_mma_layout(data, scale, pt2mx.MXSpec("fp4_e2m1"))
        >>> x = torch.arange(64.0).bfloat16()
        >>> torch.equal(torch.ops.pt2mx.linear_mx_mma_layout(x, *weight, None, "fp4_e2m1", 64, 0), x)
        True
    """

    x: Annotated[T, "(..., K) bfloat16, K a multiple of 8"]
    codes: Annotated[T, As("weight_data"), "codes, uint8, as `pt2mx.kernels.gpu.mma_layout.to_mma_layout` gives them"]
    scale: Annotated[T, As("weight_scale"), "their scales, uint8, from there too"]
    bias: Annotated[T | None, "(n,) bfloat16, or None"]
    element: Annotated[Element, f"one of {choices(sorted(FRAGMENTS))}"]
    n: Annotated[int, "rows of the weight"]
    rotation: Rotation
    tensor_scale: Annotated[
        T | None, "() or (1,) float32, which the weight is multiplied by, if its scales have a significand"
    ] = None

    def check(self) -> None:
        x, n = self.x, self.n
        if self.element not in FRAGMENTS:
            raise MXError(f"no MMA layout of {self.element!r}: allowed are {', '.join(sorted(FRAGMENTS))}")
        if x.dtype != torch.bfloat16 or not x.dim():
            raise MXError(f"weights in the MMA layout take bfloat16 x of at least one dimension, not {x.dtype}")
        if self.bias is not None:
            check_bias(self.bias, n, x.dtype, x.device)
        if x.shape[-1] % 8:
            raise MXError(f"the MMA layout is of a K that 8 divides, not {x.shape[-1]}: use linear_mx")
        if self.rotation:
            check_rotation(x, self.rotation)
        fragment = FRAGMENTS[self.element]
        tiles = -(-n // 16), -(-x.shape[-1] // fragment.k_step), 2
        has_significand = self.scale.dim() == 6
        shapes = (*tiles, fragment.words // 4, 32, 16), (*tiles, fragment.scales, 32, *[2] * has_significand)
        packed = self.codes, self.scale
        if tuple(tuple(t.shape) for t in packed) != shapes or any(t.dtype != torch.uint8 for t in packed):
            raise MXError(
                f"data {tuple(self.codes.shape)} and scale {tuple(self.scale.shape)} are no MMA layout of a "
                f"({n}, {x.shape[-1]}) weight of {self.element}: those are {shapes[0]} and {shapes[1]} uint8"
            )
        if self.tensor_scale is not None:
            t = self.tensor_scale
            if not has_significand or tuple(t.shape) not in ((), (1,)) or t.dtype != torch.float32:
                raise MXError(
                    "tensor_scale is one float32 number, of scales with a significand only; got shape "
                    f"{tuple(t.shape)} and {t.dtype}"
                )

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.n)

    def decompose(self) -> Tensor:
        layout = self.codes, self.scale, ELEMENTS[self.element], self.n, self.x.shape[-1]
        weight = from_mma_layout(*layout, self.tensor_scale)
        x = hadamard(self.x, self.rotation, -1) if self.rotation else self.x
        return functional.linear(x, weight, self.bias)


linear_mx = LinearMX.overload
grouped_linear_mx = GroupedLinearMX.overload
linear_mx_mma_layout = LinearMXMMALayout.overload
