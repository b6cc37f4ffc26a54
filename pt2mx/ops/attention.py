"""`attention_mx`, `attention_bfloat16`, `matmul_bfloat16`: attention, and matmuls of two activations.

`attention_mx` attends over a cache of codes. The other two multiply quantized values, which bfloat16 represents
(`pt2mx.fx.passes.activation_matmuls_bf16`), with its matrix instructions: exactly, with float32 sums, and results in
float32 in float32 models. torch's operators define them; `pt2mx.kernels.select` lists the kernels.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional

from pt2mx.errors import MXError
from pt2mx.kernels.select import run_kernel
from pt2mx.ops.arguments import (
    CODES,
    ROW_SCALES,
    ROWS,
    TENSOR_SCALED,
    TargetDtype,
)
from pt2mx.ops.checks import broadcasts, check_operands, check_packed, check_quantization
from pt2mx.ops.operator import As, Autocast, Format, Operator, T, gradients_by_recomputing, operator
from pt2mx.ops.quantization import Dequantize, FakeQuantize
from pt2mx.spec import MXSpec

_ELEMENT = Annotated[str | None, As("elem_dtype_name"), "the element of the result; None: it is not quantized"]


@operator("attention_mx", 2, "(B, heads, S, `value_width`) in the query's dtype")
class AttentionMX(Operator[T]):
    """`scaled_dot_product_attention` over a cache of codes: keys and values are `dequantize_mx` of theirs along the
    last dimension, in the query's dtype. Each key has the queries of as many heads as there are more of them. Sums are
    in float32, in any order; a query that sees no key gives zeros.

    Example:
        >>> scale, data = pt2mx.quantize_mx(torch.eye(4).reshape(1, 1, 4, 4), "mxfp4")
        >>> query = torch.tensor([8.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
        >>> torch.ops.pt2mx.attention_mx(query, data, scale, data, scale, "fp4_e2m1", 32, 4).flatten()
        tensor([0.9479, 0.0174, 0.0174, 0.0174])
    """

    query: Annotated[T, "(B, heads, S, D) float32, float16 or bfloat16"]
    key_data: Annotated[T, "(B, heads of the keys, L, bytes of D) uint8, packed along D, which is the axis"]
    key_scale: Annotated[T, "(B, heads of the keys, L, ceil(D / block_size)), as `quantize_mx` gives it"]
    value_data: Annotated[T, "(B, heads of the keys, L, bytes of `value_width`) uint8"]
    value_scale: Annotated[T, "(B, heads of the keys, L, ceil(`value_width` / block_size)), as of the keys"]
    spec: Annotated[MXSpec, Format(CODES, {"scale": ROW_SCALES})]
    value_width: Annotated[int, "values of a head"]
    mask: Annotated[
        T | None, "(B or 1, heads or 1, S, L) booleans, false where a key is hidden from a query; or None"
    ] = None
    scale: Annotated[float | None, "of the scores; None: D ** -0.5"] = None
    key_tensor_scale: Annotated[T | None, f"() or (1,) float32, the scale of all keys, of {TENSOR_SCALED}"] = None
    value_tensor_scale: Annotated[T | None, f"() or (1,) float32, the scale of all values, of {TENSOR_SCALED}"] = None

    def check(self) -> MXSpec:
        """Return the spec of keys and values."""
        query, keys, values, mask = self.query, self.key_data, self.value_data, self.mask
        if not query.dim() == keys.dim() == values.dim() == 4 or keys.shape[:3] != values.shape[:3]:
            raise MXError(
                f"query {tuple(query.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} must be "
                "(B, heads, S, D), (B, heads, L, bytes) and (B, heads, L, bytes)"
            )
        heads, key_heads = query.shape[1], keys.shape[1]
        if query.shape[0] != keys.shape[0] or (heads if key_heads == 0 else heads % key_heads):
            raise MXError(
                f"a query of {query.shape[0]} sequences and {query.shape[1]} heads does not fit keys of "
                f"{keys.shape[0]} sequences and {keys.shape[1]} heads: a multiple of these is allowed"
            )
        if any(tensor.device != query.device for tensor in (keys, self.key_scale, values, self.value_scale)):
            raise MXError(f"the query is on {query.device} and keys or values on another device: move them to one")
        if mask is not None and (mask.dtype != torch.bool or mask.dim() != 4):
            raise MXError(f"the mask is {mask.dtype} of {mask.dim()} dimensions: it must be (B, heads, S, L) booleans")
        scores = *query.shape[:3], keys.shape[2]
        if mask is not None and (mask.device != query.device or not broadcasts(mask.shape, scores)):
            raise MXError(
                f"a mask of {tuple(mask.shape)} on {mask.device} does not fit: it must be on {query.device} and "
                f"broadcast to {tuple(scores)}"
            )
        packing = self.spec, query.dtype
        check_packed(values, self.value_scale, *packing, self.value_width, self.value_tensor_scale)
        return check_packed(keys, self.key_scale, *packing, query.shape[-1], self.key_tensor_scale)[0]

    def define(self, spec: MXSpec) -> Tensor:
        if not self.query.numel():  # torch's attention on a GPU returns None for no heads
            return self.query.new_zeros(self.result_shape)
        return self.decompose()

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.query.shape[:3], self.value_width)

    def decompose(self) -> Tensor:
        query, packing = self.query, (self.spec, self.query.dtype)
        keys = Dequantize(self.key_data, self.key_scale, *packing, query.shape[-1], self.key_tensor_scale).call()
        values = Dequantize(
            self.value_data, self.value_scale, *packing, self.value_width, self.value_tensor_scale
        ).call()
        return functional.scaled_dot_product_attention(
            query, keys, values, self.mask, scale=self.scale, enable_gqa=query.shape[1] != keys.shape[1]
        ).contiguous()


@operator(
    "matmul_bfloat16",
    1,
    "(*batch, M, N) in `target_dtype`, contiguous",
    autocast=Autocast(("x", "y", "target_dtype")),
    saved=("x", "y"),
)
class MatmulBfloat16(Operator[T]):
    """`matmul` in float32 of values that bfloat16 holds, as quantized ones, on bfloat16 matrix units: each
    multiplication is exact, sums are in float32, in any order. A GPU rounds other values to bfloat16; elsewhere, and
    with a result in another dtype, it is `torch.matmul`. x and y have gradients; autocast casts them to its dtype.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> torch.ops.pt2mx.matmul_bfloat16(x, x)
        tensor([[ 7., 10.],
                [15., 22.]])
    """

    x: Annotated[T, "(*batch, M, K) float32, float16 or bfloat16 of any strides"]
    y: Annotated[T, "(*batch, K, N) in x's dtype, of any strides"]
    target_dtype: TargetDtype = None

    def check(self) -> torch.dtype:
        """Return the dtype of the result."""
        x, y = self.x, self.y
        dtype = check_operands(self.target_dtype, x=x, y=y)
        fits = x.dim() == y.dim() >= 2 and x.shape[:-2] == y.shape[:-2] and x.shape[-1] == y.shape[-2]
        if not fits:
            raise MXError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must be (*batch, M, K) and (*batch, K, N)")
        return dtype

    def kernel(self) -> Tensor:
        # torch's matmul in bfloat16 runs on the same units
        return run_kernel(self) if self.check() == torch.float32 else self.decompose()

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.y.shape[-1])

    def decompose(self) -> Tensor:
        return torch.matmul(self.x.to(self.result_dtype), self.y.to(self.result_dtype))

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        x, y = self.x, self.y
        return {"x": (grad @ y.to(grad.dtype).mT).to(x.dtype), "y": (x.to(grad.dtype).mT @ grad).to(y.dtype)}


@operator(
    "attention_bfloat16",
    2,
    "(B, heads, S, W) in `out_dtype`, in memory as (B, S, heads, W)",
    autocast=Autocast(("query", "key", "value", "mask", "target_dtype", "out_dtype")),
    saved=("query", "key", "value", "mask"),
    differentiable_once=True,  # as torch's attention
)
class AttentionBfloat16(Operator[T]):
    """`scaled_dot_product_attention` of values that bfloat16 holds, as quantized ones, on bfloat16 matrix units: scores
    are exact up to the order of their float32 sums; weights and their matmul with `value` are as exact as in float32,
    and a result in bfloat16 rounds the weights to it, as torch does. A GPU, or a result in bfloat16, rounds other
    values; elsewhere, and with a result in float16, it is torch's attention. A query that sees no key gives zeros. With
    an element the result is quantized in blocks along W, as by `fake_quantize_mx`; its gradient is the identity.

    Example:
        >>> query = torch.tensor([8.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
        >>> keys = torch.eye(4).reshape(1, 1, 4, 4)
        >>> options = (None, False, None, None)  # no mask, a scale and a dtype by default
        >>> torch.ops.pt2mx.attention_bfloat16(query, keys, keys, *options, None, 32, "floor", "even").flatten()
        tensor([0.9479, 0.0174, 0.0174, 0.0174])
    """

    query: Annotated[T, "(B, heads, S, D) float32, float16 or bfloat16 of any strides"]
    key: Annotated[
        T,
        "(B, heads of the keys, L, D) in the query's dtype; each head has the queries of as many heads as there are "
        "more of them",
    ]
    value: Annotated[T, "(B, heads of the keys, L, W) in the query's dtype"]
    mask: Annotated[
        T | None,
        "broadcasts to (B, heads, S, L): booleans, false where a key is hidden from a query, or values in the dtype of "
        "the result that are added to the scores; or None",
    ]
    is_causal: Annotated[bool, "key j is hidden from the queries before j; without a mask"]
    scale: Annotated[float | None, "of the scores; None: D ** -0.5"]
    target_dtype: Annotated[torch.dtype | None, "the dtype of the attention; None: the query's dtype"]
    spec: Annotated[MXSpec | None, Format({**ROWS, "element": _ELEMENT}, of="the result of attention")]
    out_dtype: Annotated[torch.dtype | None, "the dtype of a quantized result; None: the attention's dtype"] = None

    def check(self) -> tuple[torch.dtype, MXSpec | None, torch.dtype]:
        """Return the dtype of the attention, its quantization or None, and the dtype of the result."""
        dtype = self._check_product()
        if self.spec is None:
            if self.out_dtype is not None:
                raise MXError(f"out_dtype={self.out_dtype} is of a quantized result, and no element is given")
            return dtype, None, dtype
        try:
            return dtype, *check_quantization(self.value, self.spec, self.out_dtype or dtype)
        except MXError as error:
            raise MXError(f"the result of attention: {error}") from None

    def _check_product(self) -> torch.dtype:
        query, key, value, mask = self.query, self.key, self.value, self.mask
        dtype = check_operands(self.target_dtype, query=query, key=key, value=value)
        fits = query.dim() == key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3]
        if not fits or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
            raise MXError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must be "
                "(B, heads, S, D), (B, heads, L, D) and (B, heads, L, W)"
            )
        heads, key_heads = query.shape[1], key.shape[1]
        if heads if key_heads == 0 else heads % key_heads:
            raise MXError(f"{heads} heads of the query must be a multiple of the {key_heads} heads of the key")
        if mask is None:
            return dtype
        if self.is_causal:
            raise MXError("is_causal is true and there is a mask: give one of them")
        if mask.dtype not in (torch.bool, dtype) or mask.dim() > 4 or mask.device != query.device:
            raise MXError(
                f"the mask is {mask.dtype} of {mask.dim()} dimensions on {mask.device}: it must be booleans or "
                f"{dtype}, of 4 dimensions at most, on {query.device}"
            )
        scores = *query.shape[:3], key.shape[2]
        if not broadcasts(mask.shape, scores[4 - mask.dim() :]):
            raise MXError(f"a mask of {tuple(mask.shape)} does not broadcast to {tuple(scores)}")
        return dtype

    @property
    def mask_4d(self) -> Tensor | None:
        """The mask, with four dimensions."""
        return None if self.mask is None else self.mask[(None,) * (4 - self.mask.dim())]

    def define(self, dtype: torch.dtype, spec: MXSpec | None, out_dtype: torch.dtype) -> Tensor:
        if spec is None:
            return self.decompose()
        attention = self.replace(spec=None, out_dtype=None)  # a kernel may support it without the quantization
        return self.quantized(run_kernel(attention, dtype, None, dtype))

    def fake(self) -> Tensor:
        _, _, dtype = self.check()
        batch, heads, queries, _ = self.query.shape
        return self.query.new_empty((batch, queries, heads, self.value.shape[3]), dtype=dtype).transpose(1, 2)

    def decompose(self) -> Tensor:
        grouped = bool(self.query.shape[1] != self.key.shape[1])  # also of symbolic sizes
        dtype = self.target_dtype or self.query.dtype
        query, key, value = (tensor.to(dtype) for tensor in (self.query, self.key, self.value))
        attention = functional.scaled_dot_product_attention(
            query, key, value, self.mask_4d, is_causal=self.is_causal, scale=self.scale, enable_gqa=grouped
        )
        return self.quantized(attention.transpose(1, 2).contiguous().transpose(1, 2))

    def quantized(self, attention: Tensor) -> Tensor:
        """Quantize the attention (B, heads, S, W) along W, in its order in memory, where an element is given."""
        if self.spec is None:
            return attention
        result = FakeQuantize(attention.transpose(1, 2), self.spec, None, "identity").call()
        return result.to(self.out_dtype or attention.dtype).transpose(1, 2)

    def backward(self, ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        """Return the gradient of torch's attention, which is computed again; quantization passes it on unchanged."""
        names = ["query", "key", "value"]
        if self.mask is not None and self.mask.is_floating_point() and "mask" in ctx.needs:
            names.append("mask")
        attention = self.replace(spec=None, out_dtype=None)
        return gradients_by_recomputing(attention, names, lambda call: (call.decompose(),), (grad,))


attention_mx = AttentionMX.overload
matmul_bfloat16 = MatmulBfloat16.overload
attention_bfloat16 = AttentionBfloat16.overload
