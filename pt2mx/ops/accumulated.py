"""`matmul_accumulated` and the linear layers, convolutions and attention that call it: products are added in a register
of limited precision (`pt2mx.accumulator`), whose definition is `pt2mx.kernels.accumulated_matmul`.

A prepared model computes them beside torch's operators (`pt2mx.pt2e.observe.accumulator`), and a converted one instead.
The gradient is that of torch's matmul. The others are composed of `matmul_accumulated`: compilers see through them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.accumulator import Accumulator, parse_accumulator
from pt2mx.errors import MXError
from pt2mx.kernels import accumulated_matmul
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.checks import broadcasts, check_bias, check_operands, holds
from pt2mx.ops.operator import COMPLIANT, As, Autocast, Operator, T, operator

_Register = Annotated[str, "the register and the order of sums, as `pt2mx.parse_accumulator` reads it"]
_Sizes = Annotated[Sequence[int], As(type="int[]"), "of each dimension of the kernel"]
_Bias = Annotated[T | None, "(N,) in x's dtype, or None"]


@operator(
    "matmul_accumulated",
    1,
    "(*batch, M, N) in x's dtype, contiguous",
    autocast=Autocast(("x", "other", "bias")),
    saved=("x", "other"),
)
class MatmulAccumulated(Operator[T]):
    """`matmul` whose products are added in a register of limited precision; the bias is added in float32, then a cast.
    The gradient is that of torch's matmul; autocast casts the tensors to its dtype.

    Example:
        >>> x = torch.tensor([[256.0, 1.0, 1.0, 1.0]])  # bfloat16 has 8 significant bits: 257 becomes 256
        >>> torch.ops.pt2mx.matmul_accumulated(x, torch.ones(4, 1), None, "bfloat16{1}")
        tensor([[256.]])
        >>> torch.ops.pt2mx.matmul_accumulated(x, torch.ones(4, 1), None, "fixed(8,0){1}")
        tensor([[255.]])
    """

    x: Annotated[T, As("input"), "(*batch, M, K) float32, float16 or bfloat16 of any strides"]
    other: Annotated[T, "(*batch, K, N) in x's dtype; dimensions of the batch broadcast"]
    bias: Annotated[T | None, "in x's dtype, broadcasts to the result; or None"]
    accumulator: _Register

    def check(self) -> Accumulator:
        """Return the accumulator."""
        accumulator = parse_accumulator(self.accumulator)
        if accumulator is None:
            raise MXError("accumulator 'float32' is torch's own matmul: call that, or name an order, 'float32{32}'")
        tensors = {"input": self.x, "other": self.other, "bias": self.bias}
        check_operands(None, **{name: tensor for name, tensor in tensors.items() if tensor is not None})
        if min(self.x.dim(), self.other.dim()) < 2 or self.x.shape[-1] != self.other.shape[-2]:
            raise MXError(
                f"input {tuple(self.x.shape)} and other {tuple(self.other.shape)} must be (*batch, M, K) and "
                "(*batch, K, N)"
            )
        if self.bias is not None:
            shape, more = self.result_shape, len(self.result_shape) - self.bias.dim()
            if more < 0 or not broadcasts(self.bias.shape, shape[more:]):
                raise MXError(f"bias {tuple(self.bias.shape)} must broadcast to the result {tuple(shape)}")
        return accumulator

    def kernel(self) -> Tensor:
        y = run_kernel(self, self.check())
        return (y if self.bias is None else y + self.bias.float()).to(self.x.dtype)

    def define(self, accumulator: Accumulator) -> Tensor:
        return accumulated_matmul.matmul(self.x, self.other, accumulator)

    @property
    def result_shape(self) -> tuple[int, ...]:
        batch = torch.broadcast_shapes(self.x.shape[:-2], self.other.shape[:-2])
        return (*batch, self.x.shape[-2], self.other.shape[-1])

    def remember(self, ctx: Any, outputs: Any) -> None:
        ctx.bias_shape = None if self.bias is None else self.bias.shape

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        def of_other() -> Tensor:
            if self.other.dim() == 2:  # all rows are those of one batch
                return self.x.flatten(0, -2).mT @ grad.flatten(0, -2)
            return self.x.mT @ grad

        ways = {
            "x": (lambda: grad @ self.other.mT, self.x.shape),
            "other": (of_other, self.other.shape),
            "bias": (lambda: grad, ctx.bias_shape),
        }
        return {name: of().sum_to_size(shape) for name, (of, shape) in ways.items() if name in ctx.needs}


@operator("linear_accumulated", 1, "(..., N) in x's dtype, contiguous", COMPLIANT, key="CompositeImplicitAutograd")
class LinearAccumulated(Operator[T]):
    """`linear` by `matmul_accumulated`.

    Example:
        >>> torch.ops.pt2mx.linear_accumulated(torch.ones(2, 64), torch.ones(1, 64), None, "bfloat16")
        tensor([[64.],
                [64.]])
    """

    x: Annotated[T, As("input"), "(..., K) float32, float16 or bfloat16"]
    weight: Annotated[T, "(N, K) in x's dtype"]
    bias: _Bias[T]
    accumulator: _Register

    def check(self) -> None:
        if self.bias is not None:
            check_bias(self.bias, self.weight.shape[0], self.x.dtype, self.x.device)

    def kernel(self) -> Tensor:
        self.check()
        rows = self.x.reshape(math.prod(self.x.shape[:-1]), self.x.shape[-1])
        y = matmul_accumulated(rows, self.weight.mT, self.bias, self.accumulator)
        return y.reshape(*self.x.shape[:-1], self.weight.shape[0])


@operator("convolution_accumulated", 1, "(B, N, *out) in x's dtype", COMPLIANT, key="CompositeImplicitAutograd")
class ConvolutionAccumulated(Operator[T]):
    """A convolution of one to three dimensions by `matmul_accumulated`: at each position the products of the first tap
    are added, channel by channel, then those of the next tap.

    Example:
        >>> x, weight = torch.ones(1, 4, 3, 3), torch.ones(2, 4, 3, 3)
        >>> torch.ops.pt2mx.convolution_accumulated(x, weight, None, [1, 1], [0, 0], [1, 1], 1, "bfloat16").flatten()
        tensor([36., 36.])
    """

    x: Annotated[T, As("input"), "(B, C, *sizes) or (C, *sizes) float32, float16 or bfloat16"]
    weight: Annotated[T, "(N, C / groups, *kernel) in x's dtype"]
    bias: _Bias[T]
    stride: _Sizes
    padding: _Sizes
    dilation: _Sizes
    groups: Annotated[int, "groups of channels"]
    accumulator: _Register

    def check(self) -> None:
        """Raise MXError for sizes that do not fit each other."""
        x, weight, sizes = self.x, self.weight, (self.stride, self.padding, self.dilation)
        dimensions = weight.dim() - 2
        fits = 1 <= dimensions <= 3 and x.dim() in (dimensions + 1, dimensions + 2)
        if not fits or any(len(each) != dimensions for each in sizes):
            raise MXError(
                f"input {tuple(x.shape)}, weight {tuple(weight.shape)} and stride, padding, dilation "
                f"{[list(each) for each in sizes]} must be of one to three dimensions of a kernel"
            )
        channels = x.shape[-1 - dimensions]
        if weight.shape[0] % self.groups or channels != weight.shape[1] * self.groups:
            raise MXError(
                f"input {tuple(x.shape)} of {channels} channels does not fit a weight {tuple(weight.shape)} in "
                f"{self.groups} groups: (N, C / groups, *kernel), N a multiple of the groups"
            )
        for n, taps, stride, pad, dilation in zip(x.shape[-dimensions:], weight.shape[2:], *sizes, strict=True):
            if holds(n + 2 * pad < dilation * (taps - 1) + 1) or stride < 1 or dilation < 1 or pad < 0:
                raise MXError(
                    f"input {tuple(x.shape)} with padding={list(self.padding)} is smaller than the kernel "
                    f"{tuple(weight.shape[2:])} with dilation={list(self.dilation)}, or one of these is out of range"
                )
        if self.bias is not None:
            check_bias(self.bias, weight.shape[0], x.dtype, x.device)

    def kernel(self) -> Tensor:
        self.check()
        weight, taps, groups = self.weight, self.weight.shape[2:], self.groups
        x = self.x if self.x.dim() == weight.dim() else self.x.unsqueeze(0)
        x = functional.pad(x, [side for pad in reversed(self.padding) for side in (pad, pad)])
        for axis, (n, stride, dilation) in enumerate(zip(taps, self.stride, self.dilation, strict=True), 2):
            x = x.unfold(axis, dilation * (n - 1) + 1, stride)[..., ::dilation]  # (B, C, *out, *taps) in the end
        out = x.shape[2 : 2 + len(taps)]
        columns = x.unflatten(1, (groups, -1)).movedim(2, -1)  # (B, groups, *out, *taps, C / groups)
        columns = columns.flatten(2, 1 + len(taps)).flatten(3)  # (B, groups, positions, K)
        filters = weight.unflatten(0, (groups, -1)).movedim(2, -1).flatten(2)  # (groups, N / groups, K)
        bias = None if self.bias is None else self.bias.view(groups, 1, -1)
        y = matmul_accumulated(columns, filters.mT, bias, self.accumulator)  # (B, groups, positions, N / groups)
        y = y.mT.flatten(1, 2).unflatten(2, out)
        return y if self.x.dim() == weight.dim() else y.squeeze(0)


@operator("attention_accumulated", 1, "(*batch, S, W) in the query's dtype", COMPLIANT, key="CompositeImplicitAutograd")
class AttentionAccumulated(Operator[T]):
    """`scaled_dot_product_attention` whose two matmuls are `matmul_accumulated`; the softmax is torch's. A query that
    sees no key gives zeros.

    Example:
        >>> x = torch.eye(2).unsqueeze(0)
        >>> torch.ops.pt2mx.attention_accumulated(x, x, x, None, True, None, False, "hopper")[0, 0]
        tensor([1., 0.])
    """

    query: Annotated[T, "(*batch, S, D) float32, float16 or bfloat16"]
    key: Annotated[T, "(*batch, L, D) in the query's dtype"]
    value: Annotated[T, "(*batch, L, W) in the query's dtype"]
    mask: Annotated[
        T | None, As("attn_mask"), "booleans, false where a key is hidden, or addends of the scores; or None"
    ]
    is_causal: Annotated[bool, "True hides from query i the keys behind the i-th"]
    scale: Annotated[float | None, "of the scores; None: D ** -0.5"]
    enable_gqa: Annotated[bool, "True if each key has the queries of several heads"]
    accumulator: _Register

    def kernel(self) -> Tensor:
        query, key, value = self.query, self.key, self.value
        mask: Any = self.mask
        if self.enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        scores = matmul_accumulated(query, key.mT, None, self.accumulator)
        scores = scores * (query.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if self.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return matmul_accumulated(torch._safe_softmax(scores, -1), value, None, self.accumulator)


matmul_accumulated = MatmulAccumulated.overload
linear_accumulated = LinearAccumulated.overload
convolution_accumulated = ConvolutionAccumulated.overload
attention_accumulated = AttentionAccumulated.overload
#: the operators of a converted model; their last argument is the accumulator
ACCUMULATED = (matmul_accumulated, linear_accumulated, convolution_accumulated, attention_accumulated)
