"""`conv2d_mx`: convolutions with weights that stay packed, their channels last.

It computes what `conv2d(x, dequantize_mx(weight))` does, with float32 sums in another order, and is what the lowered
program calls (`pt2mx.fx.passes.convolutions_as_matmuls`). The CPU's kernel makes no patches; elsewhere the weight is
dequantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.errors import MXError
from pt2mx.ops.arguments import CODES, SCALES, Pair, ScaleOfTensor, TargetDtype
from pt2mx.ops.checks import check_bias, check_packed, check_target_dtype, holds
from pt2mx.ops.linear import PackedMatmul
from pt2mx.ops.operator import As, Autocast, Format, T, operator
from pt2mx.spec import MXSpec

ConvCodes = Annotated[
    T, As("weight_data"), "(N, height and width of the kernel, bytes of C) uint8, packed along C, which is the axis"
]
ConvScale = Annotated[
    T, As("weight_scale"), "(N, height and width of the kernel, ceil(C / block_size)), as `quantize_mx` gives it"
]
Padding = Annotated[Pair, "of height and width, zeros on both sides"]


@operator(
    "conv2d_mx",
    3,
    "(B, H', W', N) in `target_dtype`, contiguous",
    autocast=Autocast(("x", "bias", "target_dtype")),
    saved=("codes", "scale", "tensor_scale"),
)
class Conv2dMX(PackedMatmul[T]):
    """`conv2d(x, w, bias)` with channels last, where w is `dequantize_mx` of the weight along C in the dtype of the
    result; sums are in float32, in any order. x and bias have gradients; autocast casts both to its dtype.

    Example:
        >>> scale, data = pt2mx.quantize_mx(torch.ones(1, 2, 2, 4), "mxfp4")  # a kernel of 2 x 2, 4 channels
        >>> torch.ops.pt2mx.conv2d_mx(torch.ones(1, 3, 3, 4), data, scale, None, "fp4_e2m1", 32, 2, 0, 1)
        tensor([[[[16.]]]])
    """

    x: Annotated[T, "(B, H, W, C) float32, float16 or bfloat16 of any strides"]
    codes: ConvCodes[T]
    scale: ConvScale[T]
    bias: Annotated[T | None, "(N,) in the dtype of the result, or None"]
    spec: Annotated[MXSpec, Format(CODES, {"target_dtype": SCALES})]
    stride: Pair
    padding: Padding
    dilation: Pair
    target_dtype: Annotated[TargetDtype, "as of `linear_mx`"] = None
    tensor_scale: ScaleOfTensor[T] = None

    @property
    def conv_args(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        """Stride, padding and dilation, of height and width."""
        return self.stride, self.padding, self.dilation

    def check(self) -> tuple[MXSpec, torch.dtype]:
        x, codes, (stride, padding, dilation) = self.x, self.codes, self.conv_args
        if x.dim() != 4 or codes.dim() != 4 or x.device != codes.device:
            raise MXError(
                f"x of shape {tuple(x.shape)} on {x.device} and codes of shape {tuple(codes.shape)} on {codes.device}, "
                "not (B, H, W, C) and (N, *kernel, bytes of C) on one device: put the channels last"
            )
        dtype = check_target_dtype(self.target_dtype, x)
        if self.bias is not None:
            check_bias(self.bias, codes.shape[0], dtype, x.device)
        if any(holds(n == 0) for n in (*x.shape[1:], *codes.shape[:3])):
            raise MXError(
                f"x of shape {tuple(x.shape)} and codes of shape {tuple(codes.shape)} have no pixel, channel or row: "
                "none of these may be 0"
            )
        if any(len(pair) != 2 for pair in self.conv_args) or min(*stride, *dilation) < 1 or min(padding) < 0:
            raise MXError(
                f"stride={list(stride)} and dilation={list(dilation)} must be at least 1, padding={list(padding)} at "
                "least 0, two numbers each: of height and width"
            )
        if any(isinstance(n, int) and n < 1 for n in self.result_shape[1:3]):
            raise MXError(
                f"x of shape {tuple(x.shape)} with padding={list(padding)} is smaller than a kernel of "
                f"{tuple(codes.shape[1:3])} with dilation={list(dilation)}: pad it"
            )
        try:
            spec, _ = check_packed(codes, self.scale, self.spec, x.dtype, x.shape[-1], self.tensor_scale)
        except MXError as error:
            raise MXError(
                f"x of shape {tuple(x.shape)} under a weight of {tuple(codes.shape)} bytes: {error}"
            ) from None
        return spec, dtype

    @property
    def result_shape(self) -> tuple[int, ...]:
        pairs = zip(self.x.shape[1:3], self.codes.shape[1:3], *self.conv_args, strict=True)
        size = [(n + 2 * pad - dilation * (taps - 1) - 1) // stride + 1 for n, taps, stride, pad, dilation in pairs]
        return self.x.shape[0], *size, self.codes.shape[0]

    def decompose(self) -> Tensor:
        x = self.x.to(self.result_dtype)
        y = functional.conv2d(x.permute(0, 3, 1, 2), self.weight(x.dtype, x.shape[-1]), self.bias, *self.conv_args)
        return y.permute(0, 2, 3, 1).contiguous()

    def weight(self, dtype: torch.dtype, length: int) -> Tensor:
        """Return the dequantized weight (N, C, *kernel), with `length` channels."""
        return PackedMatmul.weight(self, dtype, length).permute(0, 3, 1, 2)

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        x = grad.new_empty(1).expand(ctx.shape).permute(0, 3, 1, 2)  # whose values do not count
        args = grad.permute(0, 3, 1, 2), x, self.weight(grad.dtype, ctx.shape[-1]), None, *self.conv_args
        of_x, _, _ = torch.ops.aten.convolution_backward.default(*args, False, [0, 0], 1, [True, False, False])
        return {
            "x": of_x.permute(0, 2, 3, 1).to(ctx.dtype),
            "bias": grad.sum((0, 1, 2)) if "bias" in ctx.needs else None,
        }


conv2d_mx = Conv2dMX.overload
