"""`quantize_fp8_rows`, `layer_norm_fp8_rows`, `mm_fp8_rows`: exact matmuls of quantized activations and weights on
tensor cores for FP8, with one scale a row.

`pt2mx.kernels.fp8_rowwise` says what FP8 rows are, and defines the operators on every device; `pt2mx.kernels.select`
lists the kernels. Lowered programs call them (`pt2mx.fx.passes.fp8_rowwise`).
"""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.errors import MXError
from pt2mx.kernels import fp8_rowwise
from pt2mx.kernels.fp8_rowwise import ACTIVATIONS, E4M3, ROOMS, UNFIT
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.activations import ActivationFakeQuantize, check_norm_parameters, layer_norm
from pt2mx.ops.arguments import ROWS, Element, choices
from pt2mx.ops.checks import HIGH_PRECISION, check_activation, check_input
from pt2mx.ops.operator import As, Format, Operator, T, operator
from pt2mx.spec import MXSpec

_SPREADS = ", ".join(f"2**-{room.spread} of it for `{name}`" for name, room in ROOMS.items())
_VALUES = "(..., K) float32, float16 or bfloat16 of any strides, K a multiple of 32"
_ROWS = {
    "data": "(..., K) uint8, codes of `fp8_e4m3`",
    "scale": "(..., 1) float32, a power of two, or -1 of a row that does not fit",
    "rest": "(..., K) in x's dtype: the values of the rows that do not fit; the others mean nothing",
}
#: blocks are those of the default
_FORMAT = Format(
    {
        "element": Annotated[Element, f"one of {choices(ROOMS)}"],
        "scale_mode": ROWS["scale_mode"],
        "rounding": ROWS["rounding"],
    }
)


class _WithoutGradient(Operator[T]):
    __slots__ = ()

    def backward(self, ctx: Any, *grads: Tensor) -> NoReturn:
        raise MXError("no gradient passes FP8 rows: lower the model with unpack=False")


class _MakesRows(_WithoutGradient[T]):
    """An operator that quantizes what it computes of x to FP8 rows."""

    __slots__ = ()
    x: T
    spec: MXSpec

    def check(self) -> MXSpec:
        """Return the spec of x."""
        x, element = self.x, self.spec.element.name
        if element not in ROOMS:
            raise MXError(f"{element!r} leaves no room for scales in E4M3: allowed are {', '.join(ROOMS)}")
        spec = check_input(x, self.spec)
        if ROUNDINGS[spec.rounding].random:
            raise MXError(f"FP8 rows are not rounded {spec.rounding!r}: use fake_quantize_mx")
        if not x.dim() or x.shape[-1] % spec.block_size or not x.shape[-1]:
            raise MXError(f"FP8 rows are of whole blocks of {spec.block_size} values; got x of shape {tuple(x.shape)}")
        return spec

    def fake(self) -> tuple[Tensor, ...]:
        self.check()
        x = self.x
        codes = x.new_empty(x.shape, dtype=torch.uint8)
        return codes, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), x.new_empty(x.shape)

    def rows_of(self, y: Tensor, activation: str = "none") -> tuple[Tensor, Tensor, Tensor]:
        """Return the activation of y as FP8 rows that do not fit: `mm_fp8_rows` reads their values."""
        values = ActivationFakeQuantize(y, activation, self.spec).decompose()
        scale = values.new_full((*values.shape[:-1], 1), UNFIT, dtype=torch.float32)
        return torch.zeros_like(values, dtype=torch.uint8), scale, values


@operator("quantize_fp8_rows", 3, _ROWS, words={"spreads": _SPREADS})
class QuantizeFP8Rows(_MakesRows[T]):
    """`quantize_mx` of an activation of x, in blocks of 32 along the last dimension, as FP8 rows: E4M3 codes of the
    same values with one scale a row. A row does not fit that is not finite, or where the scale of a block that is not
    zero is too far below the largest ({spreads}).

    Example:
        >>> modes = "fp4_e2m1", "floor", "even", "none"
        >>> data, scale, _ = torch.ops.pt2mx.quantize_fp8_rows(torch.ones(1, 32), *modes)
        >>> data.view(torch.float8_e4m3fn)[0, 0], scale
        (tensor(256., dtype=torch.float8_e4m3fn), tensor([[0.0039]]))
    """

    x: Annotated[T, _VALUES]
    spec: Annotated[MXSpec, _FORMAT]
    activation: Annotated[str, f"what is computed of x first, and rounded to its dtype: {choices(ACTIVATIONS)}"]

    def check(self) -> MXSpec:
        check_activation(self.activation)
        return _MakesRows.check(self)

    def define(self, spec: MXSpec) -> tuple[Tensor, Tensor, Tensor]:
        return fp8_rowwise.quantize(self.x, spec, self.activation)

    def decompose(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows_of(self.x, self.activation)


@operator(
    "layer_norm_fp8_rows",
    3,
    {"normed": "x's shape and dtype: the norm before it is quantized", **_ROWS},
)
class LayerNormFP8Rows(_MakesRows[T]):
    """`quantize_fp8_rows` of the layer norm of x + residual along the last dimension, both rounded to x's dtype.

    Example:
        >>> x = torch.tensor([[1.0, -1.0] * 16])
        >>> modes = "fp4_e2m1", "floor", "even"
        >>> normed, *rows = torch.ops.pt2mx.layer_norm_fp8_rows(x, x, None, None, 0.0, *modes)
        >>> normed[0, :4]
        tensor([ 1., -1.,  1., -1.])
    """

    x: Annotated[T, _VALUES]
    residual: Annotated[T | None, "x's shape and dtype, or None"]
    weight: Annotated[T | None, "(K,) in x's dtype or float32, or None"]
    bias: Annotated[T | None, "(K,) in x's dtype or float32, or None"]
    eps: Annotated[float, "what is added to the variance"]
    spec: Annotated[MXSpec, _FORMAT]

    def check(self) -> MXSpec:
        x, residual, spec = self.x, self.residual, _MakesRows.check(self)
        if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
            raise MXError(
                f"the residual {tuple(residual.shape)} {residual.dtype} must have the shape and the dtype of x, "
                f"{tuple(x.shape)} {x.dtype}"
            )
        check_norm_parameters(x, "x's dtype", weight=self.weight, bias=self.bias)
        return spec

    def define(self, spec: MXSpec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        normed = layer_norm(self.x, self.residual, self.weight, self.bias, self.eps)
        return normed, *fp8_rowwise.quantize(normed, spec, "none")

    def fake(self) -> tuple[Tensor, ...]:
        return self.x.new_empty(self.x.shape), *_MakesRows.fake(self)

    def decompose(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        normed = layer_norm(self.x, self.residual, self.weight, self.bias, self.eps)
        return normed, *self.rows_of(normed)


@operator("mm_fp8_rows", 1, "(..., N) in the dtype of `rest`")
class MmFP8Rows(_WithoutGradient[T]):
    """The matmul of FP8 rows and a weight of FP8 rows that all fit; a row that does not fit has its values in `rest`.
    On a GPU sums are those of its tensor cores for FP8, with partial sums in float32.

    Example:
        >>> quantize = torch.ops.pt2mx.quantize_fp8_rows
        >>> weight, scale, _ = quantize(torch.eye(32), "fp4_e2m1", "floor", "even", "none")
        >>> rows = quantize(torch.full((1, 32), 3.0), "fp6_e2m3", "floor", "even", "none")
        >>> torch.ops.pt2mx.mm_fp8_rows(*rows, weight, scale)[0, :4]
        tensor([3., 3., 3., 3.])
    """

    data: Annotated[T, "(..., K) uint8, K a multiple of 16"]
    scale: Annotated[T, "(..., 1) float32"]
    unfit: Annotated[T, As("rest"), "(..., K) float32, float16 or bfloat16"]
    weight: Annotated[T, As("weight_data"), "(N, K) uint8, N a multiple of 16"]
    weight_scale: Annotated[T, "(N, 1) float32"]
    bias: Annotated[T | None, "(N,) in the dtype of `rest`, or None"] = None

    def check(self) -> None:
        data, scale, unfit, weight, weight_scale, bias = self.args
        if {data.dtype, weight.dtype} != {torch.uint8} or {scale.dtype, weight_scale.dtype} != {torch.float32}:
            raise MXError(
                f"FP8 rows are uint8 codes and float32 scales, not {data.dtype} and {scale.dtype}, and a weight of "
                f"{weight.dtype} and {weight_scale.dtype}"
            )
        if not data.dim() or data.shape != unfit.shape or scale.shape != (*data.shape[:-1], 1):
            raise MXError(
                f"codes {tuple(data.shape)}, scale {tuple(scale.shape)} and rest {tuple(unfit.shape)} are no FP8 rows: "
                "pass what quantize_fp8_rows returned"
            )
        if unfit.dtype not in HIGH_PRECISION:
            raise MXError(f"rest of {unfit.dtype} must be float32, float16 or bfloat16")
        if weight.dim() != 2 or weight.shape[1] != data.shape[-1] or weight_scale.shape != (weight.shape[0], 1):
            raise MXError(
                f"a weight {tuple(weight.shape)} with scales {tuple(weight_scale.shape)} does not fit rows of "
                f"{data.shape[-1]} values: expected (N, {data.shape[-1]}) and (N, 1)"
            )
        if weight.shape[0] % 16 or weight.shape[1] % 16:
            raise MXError(
                f"tensor cores for FP8 take weights of multiples of 16 rows and columns, not {(*weight.shape,)}"
            )
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != unfit.dtype):
            raise MXError(f"bias {tuple(bias.shape)} {bias.dtype} must be ({weight.shape[0]},) in {unfit.dtype}")

    def define(self) -> Tensor:
        return fp8_rowwise.mm(*self.args)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.weight.shape[0])

    @property
    def result_dtype(self) -> torch.dtype:
        return self.unfit.dtype

    def decompose(self) -> Tensor:
        values = self.data.view(E4M3).to(torch.float32) * self.scale
        weight = self.weight.view(E4M3).to(torch.float32) * self.weight_scale
        x = torch.where(self.scale < 0, self.unfit, values.to(self.unfit.dtype))
        return functional.linear(x, weight.to(self.unfit.dtype), self.bias)


quantize_fp8_rows = QuantizeFP8Rows.overload
layer_norm_fp8_rows = LayerNormFP8Rows.overload
mm_fp8_rows = MmFP8Rows.overload
