"""`linear_fake_quantize_mx`, `conv2d_fake_quantize_mx`: matmuls with packed weights whose kernel also computes and
quantizes the activation that follows.

Lowered programs for the CPU call them (`pt2mx.fx.passes.fuse_quantize_epilogue`), and
Inductor keeps them calls. `pt2mx.kernels.select` lists the kernels; without one each is its two operators.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS
from pt2mx.ops.activations import BACKWARD, ActivationFakeQuantize
from pt2mx.ops.arguments import ROWS, WEIGHT_CODES, WEIGHT_SCALE, Element, Pair, choices
from pt2mx.ops.checks import HIGH_PRECISION, check_activation, check_quantization
from pt2mx.ops.convolution import Conv2dMX, ConvCodes, ConvScale, Padding
from pt2mx.ops.linear import LinearMX
from pt2mx.ops.operator import As, Autocast, Format, Operator, T, gradients_by_recomputing, operator
from pt2mx.spec import MXSpec

_ProductDtype = Annotated[torch.dtype | None, "the dtype to which the product is rounded; None is that of x"]
_RESULT = {
    **ROWS,
    "element": Annotated[str, As("out_elem_dtype_name"), "the element of the result"],
    "block_size": Annotated[int, As("out_block_size"), "that of the result"],
}
_BLOCK_SIZE = Annotated[int, "that of the weight"]


class _QuantizesMatmul(Operator[T]):
    """A matmul with a packed weight, the activation of its result, and the quantization of that."""

    __slots__ = ()
    x: T
    activation: str
    out_spec: MXSpec
    target_dtype: torch.dtype | None

    def check_result(self, name: str, dtype: torch.dtype) -> tuple[MXSpec, torch.dtype]:
        """Return the spec and the dtype of the quantized result. `dtype`: the dtype before quantization."""
        check_activation(self.activation)
        try:
            return check_quantization(self.x, self.out_spec, self.target_dtype or dtype)
        except MXError as error:
            raise MXError(f"the result of the {name}: {error}") from None

    def quantize(self, y: Tensor) -> ActivationFakeQuantize[Tensor]:
        """Return the call that quantizes the activation of y."""
        return ActivationFakeQuantize(y, self.activation, self.out_spec, self.target_dtype)


@operator(
    "linear_fake_quantize_mx",
    2,
    "(..., N) in `target_dtype`",
    autocast=Autocast(("x", "bias", "product_dtype")),
    saved=("x", "codes", "scale", "bias"),
)
class LinearFakeQuantize(_QuantizesMatmul[T]):
    """`activation_fake_quantize_mx` of `linear_mx`, to the bit. The gradient is that of both; autocast casts x and bias
    to its dtype, to which the product is rounded then.

    Example:
        >>> scale, data = pt2mx.quantize_mx(torch.eye(4), "mxfp4")
        >>> x = torch.tensor([-1.0, 1.1, 4.0, 0.0])
        >>> modes = (None, "relu", "fp4_e2m1", 32, "floor", "even")
        >>> torch.ops.pt2mx.linear_fake_quantize_mx(x, data, scale, None, "fp4_e2m1", 32, *modes)
        tensor([0., 1., 4., 0.])
    """

    x: Annotated[T, "(..., K) float32, float16 or bfloat16"]
    codes: Annotated[T, As("weight_data"), WEIGHT_CODES]
    scale: Annotated[T, As("weight_scale"), WEIGHT_SCALE]
    bias: Annotated[T | None, "(N,) in the dtype of the product, or None"]
    spec: Annotated[
        MXSpec,
        Format(
            {
                "element": Annotated[Element, "the element of the weight, as of `linear_mx`"],
                "block_size": _BLOCK_SIZE,
            }
        ),
    ]
    product_dtype: _ProductDtype
    activation: Annotated[str, f"what is computed of the product: {choices(ACTIVATIONS)}"]
    out_spec: Annotated[MXSpec, Format(_RESULT, of="the result of the product")]
    target_dtype: Annotated[torch.dtype | None, "float32, float16 or bfloat16; None is that of the product"] = None

    @property
    def linear(self) -> LinearMX[T]:
        """The linear layer whose result is quantized."""
        weight = self.codes, self.scale, self.bias, self.spec
        return LinearMX(self.x, *weight, 0, self.product_dtype)

    def check(self) -> tuple[MXSpec, torch.dtype, MXSpec, torch.dtype]:
        """Return the weight's spec, the dtype of the product, the spec of the result and its dtype."""
        weight, product_dtype = self.linear.check()
        return weight, product_dtype, *self.check_result("product", product_dtype)

    def define(self, *checked: Any) -> Tensor:
        return self.quantize(self.linear.kernel()).kernel()

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.linear.result_shape

    @property
    def result_dtype(self) -> torch.dtype:
        return self.target_dtype or self.linear.result_dtype

    def decompose(self) -> Tensor:
        return self.quantize(self.linear.decompose()).decompose()

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        with torch.autocast(self.x.device.type, enabled=False):  # as the product was cast already
            product = self.linear.call()
        grad = BACKWARD[self.activation](grad.to(product.dtype), product)
        of_x = grad @ self.linear.weight(grad.dtype, self.x.shape[-1])
        return {"x": of_x.to(self.x.dtype), "bias": None if self.bias is None else grad.flatten(0, -2).sum(0)}


@operator(
    "conv2d_fake_quantize_mx",
    2,
    {
        "activated": "(B, H', W', N) in the dtype of the sum: the activation before it is quantized, whose last bits "
        "are the device's own; no values where it is not kept",
        "quantized": "(B, H', W', N) in `target_dtype`",
    },
    autocast=Autocast(("x", "bias", "product_dtype")),
    saved=("x", "codes", "scale", "bias", "residual"),
    differentiable_once=True,
)
class Conv2dFakeQuantize(_QuantizesMatmul[T]):
    """`activation_fake_quantize_mx` of `conv2d_mx` + residual, to the bit, and the activation. Product, sum and
    activation are rounded to their dtype. The gradient is that of all of these; autocast casts x and bias to its dtype,
    to which the product is rounded then.

    Example:
        >>> scale, data = pt2mx.quantize_mx(torch.eye(4).reshape(4, 1, 1, 4), "mxfp4")
        >>> x = torch.tensor([-1.0, 1.1, 4.0, 0.0]).reshape(1, 1, 1, 4)
        >>> modes = (1, 0, 1, None, x, "relu", True, "fp4_e2m1", 32, "floor", "even")
        >>> activated, quantized = torch.ops.pt2mx.conv2d_fake_quantize_mx(x, data, scale, None, "fp4_e2m1", 32, *modes)
        >>> activated.flatten(), quantized.flatten()
        (tensor([0.0000, 2.2000, 8.0000, 0.0000]), tensor([0., 2., 8., 0.]))
    """

    x: Annotated[T, "(B, H, W, C) float32, float16 or bfloat16 of any strides"]
    codes: ConvCodes[T]
    scale: ConvScale[T]
    bias: Annotated[T | None, "(N,) in the dtype of the product, or None"]
    spec: Annotated[
        MXSpec,
        Format(
            {
                "element": Annotated[Element, "the element of the weight, as of `conv2d_mx`"],
                "block_size": _BLOCK_SIZE,
            }
        ),
    ]
    stride: Pair
    padding: Padding
    dilation: Pair
    product_dtype: _ProductDtype
    residual: Annotated[T | None, "(B, H', W', N) float32, float16 or bfloat16, added to the product, or None"]
    activation: Annotated[str, f"what is computed of the sum: {choices(ACTIVATIONS)}"]
    keep_activated: Annotated[bool, "true: the activation is a result too"]
    out_spec: Annotated[MXSpec, Format(_RESULT, of="the result of the convolution")]
    target_dtype: Annotated[torch.dtype | None, "float32, float16 or bfloat16; None is that of the sum"] = None

    @property
    def conv(self) -> Conv2dMX[T]:
        """The convolution whose result is quantized."""
        weight = self.codes, self.scale, self.bias, self.spec
        return Conv2dMX(self.x, *weight, self.stride, self.padding, self.dilation, self.product_dtype)

    def check(self) -> tuple[MXSpec, torch.dtype, torch.dtype, MXSpec, torch.dtype]:
        """Return the weight's spec, the dtypes of the product and of its sum with the residual, the spec of the result
        and its dtype."""
        conv, residual = self.conv, self.residual
        weight, product_dtype = conv.check()
        sum_dtype, shape = product_dtype, conv.result_shape
        if residual is not None:
            if residual.shape != shape or residual.dtype not in HIGH_PRECISION or residual.device != self.x.device:
                raise MXError(
                    f"the residual of shape {tuple(residual.shape)}, {residual.dtype} on {residual.device} must be "
                    f"{tuple(shape)} in float32, float16 or bfloat16 on {self.x.device}, as the result of the "
                    "convolution"
                )
            sum_dtype = torch.promote_types(product_dtype, residual.dtype)
        return weight, product_dtype, sum_dtype, *self.check_result("convolution", sum_dtype)

    def define(self, *checked: Any) -> tuple[Tensor, Tensor]:
        return self.in_steps(Conv2dMX.kernel, ActivationFakeQuantize.kernel)

    def in_steps(self, convolve: Any, quantize: Any) -> tuple[Tensor, Tensor]:
        """Return the results by two functions of calls."""
        product = convolve(self.conv)
        summed = product if self.residual is None else product + self.residual
        quantized = quantize(self.quantize(summed))
        activated = ACTIVATIONS[self.activation](summed).contiguous() if self.keep_activated else summed.new_empty(0)
        return activated, quantized

    def fake(self) -> tuple[Tensor, Tensor]:
        _, _, sum_dtype, _, dtype = self.check()
        shape = self.conv.result_shape
        activated = self.x.new_empty(shape if self.keep_activated else (0,), dtype=sum_dtype)
        return activated, self.x.new_empty(shape, dtype=dtype)

    def decompose(self) -> tuple[Tensor, Tensor]:
        return self.in_steps(Conv2dMX.decompose, ActivationFakeQuantize.decompose)

    def backward(self, ctx: Any, *grads: Tensor) -> dict[str, Tensor | None]:
        """The gradient of the steps, which are computed again."""
        names = [name for name in ("x", "bias", "residual") if getattr(self, name) is not None]
        return gradients_by_recomputing(self, names, lambda call: call.in_steps(Operator.call, Operator.call), grads)


linear_fake_quantize_mx = LinearFakeQuantize.overload
conv2d_fake_quantize_mx = Conv2dFakeQuantize.overload
