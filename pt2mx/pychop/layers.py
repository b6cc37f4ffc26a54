"""pychop's torch modules: fake quantization with a straight-through gradient, linear layers and attention."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from pt2mx.errors import MXError
from pt2mx.pychop.formats import resolve
from pt2mx.pychop.quantize import Format, mx_quantize


class MXQuantizerSTE(nn.Module):
    """pychop's `MXQuantizerSTE`: `mx_quantize` as a torch module, whose gradient passes unchanged."""

    def __init__(
        self,
        format: Format = "mxfp8_e4m3",
        block_size: int = 32,
        scale_exp_bits: int | None = None,
        scale_sig_bits: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = resolve(format, block_size, scale_exp_bits, scale_sig_bits)

    def forward(self, x: Tensor) -> Tensor:
        """x: (...) -> (...), quantized and dequantized."""
        return mx_quantize(x, self.spec)

    def extra_repr(self) -> str:
        return repr(self.spec)


class MXLinear(nn.Linear):
    """pychop's `MXLinear`: `nn.Linear` with a quantized weight, and on request a quantized input and output.

    As in pychop, blocks run over the flattened tensors: they cross rows if `in_features` is no multiple of
    `block_size`. The bias is not quantized. `kwargs` are those of `nn.Linear` (device and dtype).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        weight_format: Format = "mxfp8_e4m3",
        act_format: Format | None = None,
        block_size: int = 32,
        quantize_input: bool = True,
        quantize_output: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        act_format = weight_format if act_format is None else act_format
        self.weight_quantizer = MXQuantizerSTE(weight_format, block_size)
        self.input_quantizer = MXQuantizerSTE(act_format, block_size) if quantize_input else None
        self.output_quantizer = MXQuantizerSTE(act_format, block_size) if quantize_output else None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> (..., out)."""
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        y = nn.functional.linear(x, self.weight_quantizer(self.weight), self.bias)
        return y if self.output_quantizer is None else self.output_quantizer(y)


class MXAttention(nn.Module):
    """pychop's `MXAttention`: multi-head attention whose projections are `MXLinear` and whose scores are quantized
    before the mask is added.

    Raises:
        MXError: where `num_heads` does not divide `embed_dim`; as `mx_quantize`, for the format.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        format: Format = "mxfp8_e4m3",
        block_size: int = 32,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if not (isinstance(num_heads, int) and num_heads > 0) or embed_dim % num_heads:
            raise MXError(f"embed_dim={embed_dim} must be a multiple of num_heads={num_heads}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.q_proj = MXLinear(embed_dim, embed_dim, bias, format, block_size=block_size)
        self.k_proj = MXLinear(embed_dim, embed_dim, bias, format, block_size=block_size)
        self.v_proj = MXLinear(embed_dim, embed_dim, bias, format, block_size=block_size)
        self.out_proj = MXLinear(embed_dim, embed_dim, bias, format, block_size=block_size)
        self.dropout = nn.Dropout(dropout)
        self.score_quantizer = MXQuantizerSTE(format, block_size)

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """query: (B, T, E); key, value: (B, S, E), the query where they are None; attn_mask: added to the scores
        (B, heads, T, S) -> (B, T, E)."""
        q = self._heads(self.q_proj(query))  # (B, heads, T, head_dim)
        k = self._heads(self.k_proj(query if key is None else key))
        v = self._heads(self.v_proj(query if value is None else value))
        scores = self.score_quantizer(q @ k.transpose(-2, -1) / math.sqrt(self.head_dim))
        if attn_mask is not None:
            scores = scores + attn_mask
        y = self.dropout(torch.softmax(scores, dim=-1)) @ v
        return self.out_proj(y.transpose(1, 2).flatten(-2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)


def convert_linear_to_mx(
    module: nn.Module,
    format: Format = "mxfp8_e4m3",
    block_size: int = 32,
    quantize_input: bool = True,
    quantize_output: bool = False,
    inplace: bool = True,
) -> nn.Module:
    """Replace every `nn.Linear` inside a module by an `MXLinear` that holds its parameters, as
    `pychop.convert_linear_to_mx` does. If the module is a linear layer itself, it does not change, and the function
    returns an `MXLinear` for it.

    Raises:
        MXError: for another object than a module; as `mx_quantize`, for the format.
    """
    if not isinstance(module, nn.Module):
        raise MXError(f"expected a torch module, not {type(module).__name__}")
    spec = resolve(format, block_size)

    def converted(module: nn.Module) -> nn.Module:
        if isinstance(module, MXLinear):
            return module
        if isinstance(module, nn.Linear):
            sizes = module.in_features, module.out_features, False, spec
            new = MXLinear(*sizes, quantize_input=quantize_input, quantize_output=quantize_output, device="meta")
            new.weight, new.bias = module.weight, module.bias
            return new.train(module.training)
        for name, child in module.named_children():
            setattr(module, name, converted(child))
        return module

    return converted(module if inplace else copy.deepcopy(module))
