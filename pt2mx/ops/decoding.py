"""The operators of a decoder's step: `normed_linear_mx`, `residual_linear_mx`, `decoding_attention` and
`decoding_attention_mx`.

Two are linear layers with a norm, a gate or a residual sum; `pt2mx.kernels.decoder_linear` says how they share the work
of a norm. Only programs for single tokens call these operators: on an NVIDIA GPU all of them
(`pt2mx.fx.passes.fuse_decoding`), on a CPU `decoding_attention`.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.errors import MXError
from pt2mx.formats import ELEMENTS
from pt2mx.kernels.decoder_linear import GATE_ROWS, GATES, parts
from pt2mx.kernels.gpu.mma_layout import ROWS, from_mma_layout
from pt2mx.ops.arguments import CODES, ROW_SCALES, Element, choices
from pt2mx.ops.attention import AttentionMX
from pt2mx.ops.checks import HIGH_PRECISION, broadcasts, check_one_device
from pt2mx.ops.linear import LinearMXMMALayout
from pt2mx.ops.operator import As, Format, Operator, T, operator
from pt2mx.spec import MXSpec

_X = "(..., K) bfloat16, K a multiple of 8"
_OF_LINEAR = "as of `linear_mx_mma_layout`"
_OF_ATTENTION = "as of `attention_mx`"
_ZEROS = (
    "(n,) int32 counters, n at least B times the heads of the keys: zeros before and after the call. Calls at the same "
    "time need their own. None: a second kernel joins the results of the first"
)


class _DecoderLinear(Operator[T]):
    __slots__ = ()
    x: T
    codes: T
    scale: T
    bias: T | None
    element: str
    n: int
    tensor_scale: T | None

    def check_linear(self) -> None:
        layer = self.x, self.codes, self.scale, self.bias, self.element, self.n, 0, self.tensor_scale
        LinearMXMMALayout(*layer).check()

    def matmul(self) -> Tensor:
        """Return x times the weight, (..., n) float32."""
        layout = self.codes, self.scale, ELEMENTS[self.element], self.n, self.x.shape[-1]
        weight = from_mma_layout(*layout, self.tensor_scale)
        return functional.linear(self.x.float(), weight.float())


@operator("normed_linear_mx", 1, "(..., n) bfloat16, with a gate (..., n / 2)")
class NormedLinearMX(_DecoderLinear[T]):
    """`linear_mx_mma_layout` of x over its root mean square, `(squares.sum(-1) / K + eps) ** 0.5`; then, with a gate,
    the activation of the gate's columns times the others.

    Example:
        >>> from pt2mx.kernels.gpu.mma_layout import to_mma_layout
        >>> scale, data = pt2mx.quantize_mx(torch.eye(64), "mxfp4")
        >>> weight = to_mma_layout(data, scale, pt2mx.MXSpec("fp4_e2m1"))
        >>> x, squares = torch.full((1, 64), 3.0).bfloat16(), torch.full((1, 4), 9.0 * 16)
        >>> torch.ops.pt2mx.normed_linear_mx(x, *weight, None, "fp4_e2m1", 64, squares, 0.0, None)[0, :2]
        tensor([1., 1.], dtype=torch.bfloat16)
    """

    x: Annotated[T, _X]
    codes: Annotated[T, As("weight_data"), _OF_LINEAR]
    scale: Annotated[T, As("weight_scale"), _OF_LINEAR]
    bias: Annotated[T | None, "(n,) bfloat16, or None"]
    element: Element
    n: Annotated[int, f"rows of the weight; with a gate {GATE_ROWS} of it and {GATE_ROWS} of the values, in turns"]
    squares: Annotated[T | None, "(..., ceil(K / 16)) float32, as of `residual_linear_mx`; None: x is not divided"]
    eps: Annotated[float, "added to the mean of the squares"]
    gate: Annotated[str | None, f"the activation of the gate, {choices(GATES)}; None: no gate"]
    tensor_scale: Annotated[T | None, _OF_LINEAR] = None

    def check(self) -> None:
        self.check_linear()
        x, squares = self.x, self.squares
        if self.gate is not None and self.gate not in GATES:
            raise MXError(f"no gate {self.gate!r}: allowed are {', '.join(GATES)}, or None")
        if self.gate is not None and self.n % ROWS:
            raise MXError(f"the weight of a gate has {self.n} rows: a multiple of {ROWS} is allowed")
        if squares is not None:
            _check(squares, "squares", (*x.shape[:-1], -(-x.shape[-1] // ROWS)), torch.float32, x.device)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.n if self.gate is None else self.n // 2)

    def decompose(self) -> Tensor:
        y = self.matmul()
        if self.squares is not None:
            y = y * torch.rsqrt(self.squares.sum(-1, keepdim=True) / self.x.shape[-1] + self.eps)
        y = (y if self.bias is None else y + self.bias).to(self.x.dtype)
        if self.gate is None:
            return y
        of_gate, values = parts(y.float())
        return (GATES[self.gate](of_gate) * values).to(self.x.dtype).contiguous()


@operator(
    "residual_linear_mx",
    1,
    {
        "total": "(..., n) bfloat16, the residual plus the rounded result of the layer",
        "weighted": "(..., n) bfloat16, the total times `norm_weight`",
        "squares": "(..., ceil(n / 16)) float32: for each 16 values of the total the sum of their squares",
    },
)
class ResidualLinearMX(_DecoderLinear[T]):
    """`linear_mx_mma_layout` of x, added to the residual, and what the norm after it needs: `normed_linear_mx` takes
    the weighted total as x, with its squares.

    Example:
        >>> from pt2mx.kernels.gpu.mma_layout import to_mma_layout
        >>> scale, data = pt2mx.quantize_mx(torch.eye(64), "mxfp4")
        >>> weight = to_mma_layout(data, scale, pt2mx.MXSpec("fp4_e2m1"))
        >>> x, two = torch.ones(1, 64).bfloat16(), torch.full((64,), 2.0).bfloat16()
        >>> sums = torch.ops.pt2mx.residual_linear_mx(x, *weight, None, "fp4_e2m1", 64, x, two)
        >>> [tensor[0, 0].item() for tensor in sums]
        [2.0, 4.0, 64.0]
    """

    x: Annotated[T, _X]
    codes: Annotated[T, As("weight_data"), _OF_LINEAR]
    scale: Annotated[T, As("weight_scale"), _OF_LINEAR]
    bias: Annotated[T | None, "(n,) bfloat16, or None"]
    element: Element
    n: Annotated[int, "rows of the weight"]
    residual: Annotated[T, "(..., n) bfloat16"]
    norm_weight: Annotated[T, "(n,) bfloat16"]
    tensor_scale: Annotated[T | None, _OF_LINEAR] = None

    def check(self) -> None:
        self.check_linear()
        expected = torch.bfloat16, self.x.device
        _check(self.residual, "residual", (*self.x.shape[:-1], self.n), *expected)
        _check(self.norm_weight, "norm_weight", (self.n,), *expected)

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        self.check()
        shape = (*self.x.shape[:-1], self.n)
        squares = self.x.new_empty(*shape[:-1], -(-self.n // ROWS), dtype=torch.float32)
        return self.x.new_empty(shape), self.x.new_empty(shape), squares

    def decompose(self) -> tuple[Tensor, Tensor, Tensor]:
        y = self.matmul()
        total = self.residual + (y if self.bias is None else y + self.bias).to(self.x.dtype)
        squares = functional.pad(total.float().square(), (0, -self.n % ROWS)).unflatten(-1, (-1, ROWS)).sum(-1)
        return total, total * self.norm_weight, squares


@operator("decoding_attention", 1, "(B, heads, S, W) in the query's dtype")
class DecodingAttention(Operator[T]):
    """`scaled_dot_product_attention` of a few queries over a cache of floats. Several heads of queries may share a head
    of keys. Sums are in float32, in any order; a query that sees no key gives zeros.

    Example:
        >>> query = torch.tensor([8.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4).bfloat16()
        >>> keys = torch.eye(4).reshape(1, 1, 4, 4).bfloat16()
        >>> torch.ops.pt2mx.decoding_attention(query, keys, keys, None, None, None).flatten()
        tensor([0.9492, 0.0173, 0.0173, 0.0173], dtype=torch.bfloat16)
    """

    query: Annotated[T, "(B, heads, S, D) float32, float16 or bfloat16"]
    keys: Annotated[T, "(B, heads of the keys, L, D) in the query's dtype"]
    values: Annotated[T, "(B, heads of the keys, L, W) in the query's dtype"]
    mask: Annotated[T | None, "booleans that broadcast to (B, heads, S, L), false where a key is hidden; or None"]
    scale: Annotated[float | None, "of the scores; None: D ** -0.5"]
    zeros: Annotated[T | None, _ZEROS]

    def check(self) -> None:
        query, keys, values = self.query, self.keys, self.values
        fits = query.dim() == keys.dim() == values.dim() == 4 and keys.shape[:3] == values.shape[:3]
        if not fits or query.shape[0] != keys.shape[0] or query.shape[3] != keys.shape[3]:
            raise MXError(
                f"query {tuple(query.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} must be "
                "(B, heads, S, D), (B, heads of the keys, L, D) and (B, heads of the keys, L, W)"
            )
        if not keys.shape[1] or query.shape[1] % keys.shape[1]:
            raise MXError(
                f"{query.shape[1]} heads of queries: allowed is a multiple of the {keys.shape[1]} of the keys"
            )
        dtypes = query.dtype, keys.dtype, values.dtype
        if query.dtype not in HIGH_PRECISION or len(set(dtypes)) > 1:
            raise MXError(
                f"query, keys and values are {', '.join(map(str, dtypes))}: all must be float32, float16 or bfloat16"
            )
        _check_zeros(self.zeros)
        mask, scores = self.mask, (*query.shape[:3], keys.shape[2])
        if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4 or not broadcasts(mask.shape, scores)):
            raise MXError(f"the mask must be booleans that broadcast to {scores}, not {tuple(mask.shape)} {mask.dtype}")
        check_one_device(self.args)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.query.shape[:3], self.values.shape[3])

    def decompose(self) -> Tensor:
        tensors, shared = (self.query, self.keys, self.values), self.query.shape[1] != self.keys.shape[1]
        y = functional.scaled_dot_product_attention(*tensors, self.mask, scale=self.scale, enable_gqa=shared)
        return y.contiguous()


@operator("decoding_attention_mx", 1, "(B, heads, S, `value_width`) in the query's dtype")
class DecodingAttentionMX(Operator[T]):
    """`attention_mx` of a few queries, without tensor scales. On an NVIDIA GPU several programs divide the slots.

    Example:
        >>> scale, data = pt2mx.quantize_mx(torch.eye(4).reshape(1, 1, 4, 4), "mxfp4")
        >>> query = torch.tensor([8.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
        >>> operands = query, data, scale, data, scale, "fp4_e2m1", 32, 4, None, None, None
        >>> torch.ops.pt2mx.decoding_attention_mx(*operands).flatten()
        tensor([0.9479, 0.0174, 0.0174, 0.0174])
    """

    query: Annotated[T, _OF_ATTENTION]
    key_data: Annotated[T, _OF_ATTENTION]
    key_scale: Annotated[T, _OF_ATTENTION]
    value_data: Annotated[T, _OF_ATTENTION]
    value_scale: Annotated[T, _OF_ATTENTION]
    spec: Annotated[MXSpec, Format(CODES, {"zeros": ROW_SCALES})]
    value_width: Annotated[int, "values of a head"]
    mask: Annotated[T | None, _OF_ATTENTION]
    scale: Annotated[float | None, "of the scores; None: D ** -0.5"]
    zeros: Annotated[T | None, _ZEROS]

    @property
    def attention(self) -> AttentionMX[T]:
        """The call of `attention_mx` with the same result."""
        cache = self.key_data, self.key_scale, self.value_data, self.value_scale
        return AttentionMX(self.query, *cache, self.spec, self.value_width, self.mask, self.scale)

    def check(self) -> MXSpec:
        """Return the spec of keys and values."""
        spec = self.attention.check()
        _check_zeros(self.zeros)
        check_one_device(self.args)
        return spec

    def define(self, spec: MXSpec) -> Tensor:
        return self.attention.kernel()

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.attention.result_shape

    def decompose(self) -> Tensor:
        return self.attention.decompose()


#: computes nothing: Inductor stores the values, and does not compute them again for each reader
torch.library.define("pt2mx::stored", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.impl("pt2mx::stored", "CompositeExplicitAutograd")
@torch.library.register_fake("pt2mx::stored")
def _stored(x: Tensor) -> Tensor:
    return x.clone()


def _check_zeros(zeros: Tensor | None) -> None:
    if zeros is not None and (zeros.dtype != torch.int32 or zeros.dim() != 1 or not zeros.is_contiguous()):
        actual = f"{tuple(zeros.shape)} {zeros.dtype} of strides {zeros.stride()}"
        raise MXError(f"zeros must be (n,) torch.int32 and contiguous, not {actual}")


def _check(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    actual = tuple(tensor.shape), tensor.dtype, tensor.device
    if actual != (tuple(shape), dtype, device):
        of_both = [f"{size} {kind} on {place}" for size, kind, place in ((tuple(shape), dtype, device), actual)]
        raise MXError(f"{name} must be {of_both[0]}, not {of_both[1]}")


normed_linear_mx = NormedLinearMX.overload
residual_linear_mx = ResidualLinearMX.overload
decoding_attention = DecodingAttention.overload
decoding_attention_mx = DecodingAttentionMX.overload
stored = torch.ops.pt2mx.stored.default
