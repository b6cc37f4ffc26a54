"""pychop's torch modules: fake quantization with a straight-through gradient, linear layers and attention."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from pt2mx.errors import MXError
from pt2mx.pychop.formats import MXSpec, resolve
from pt2mx.pychop.quantize import mx_quantize

Format = str | MXSpec | tuple[int, int]


class MXQuantizerSTE(nn.Module):
    """pychop's `MXQuantizerSTE`: `mx_quantize` as a torch module, whose gradient passes unchanged.

    Args:
        format, block_size, scale_exp_bits, scale_sig_bits: as in `mx_quantize`.

    Raises:
        MXError: as `mx_quantize`, for the format.

    Example:
        >>> import torch
        >>> from pt2mx import pychop
        >>> quantize = pychop.MXQuantizerSTE("mxint8", block_size=4)
        >>> quantize
        MXQuantizerSTE(format=mxint8, block_size=4)
        >>> quantize(torch.tensor([1.0, 2.4, -0.3, 7.0]))
        tensor([ 1.0000,  2.3750, -0.3125,  7.0000])
    """

    def __init__(
        self,
        format: Format = "mxfp8_e4m3",
        block_size: int = 32,
        scale_exp_bits: int | None = None,
        scale_sig_bits: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = resolve(format, block_size, scale_exp_bits, scale_sig_bits)
        self.block_size, self.scale_exp_bits = self.spec.block_size, self.spec.scale_exp_bits
        self.scale_sig_bits = self.spec.scale_sig_bits
        self.format_str = format if isinstance(format, str) else self.spec.name
        if isinstance(format, tuple):
            self.format_str = f"E{self.spec.exp_bits}M{self.spec.sig_bits}"

    def forward(self, x: Tensor) -> Tensor:
        """x: (...) -> (...), quantized and dequantized."""
        return mx_quantize(x, self.spec)

    def __repr__(self) -> str:
        return f"MXQuantizerSTE(format={self.format_str}, block_size={self.block_size})"


class MXLinear(nn.Linear):
    """pychop's `MXLinear`: `nn.Linear` with a quantized weight, and on request a quantized input and output.

    As in pychop, blocks run over the flattened tensors: they cross rows if `in_features` is no multiple of
    `block_size`. The bias is not quantized.

    Args:
        in_features, out_features, bias: as in `nn.Linear`; `kwargs` too (device and dtype).
        weight_format: of the weight, as `format` in `mx_quantize`.
        act_format: of input and output; by default `weight_format`.
        block_size: values that share a scale.
        quantize_input, quantize_output: true to quantize them.

    Raises:
        MXError: as `mx_quantize`, for the formats.

    Example:
        >>> import torch
        >>> from pt2mx import pychop
        >>> layer = pychop.MXLinear(4, 1, bias=False, weight_format="mxint8", block_size=4)
        >>> layer.weight.data = torch.ones(1, 4)
        >>> layer(torch.tensor([1.0, 2.4, -0.3, 7.0])).detach()
        tensor([10.0625])
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

    Args:
        embed_dim: features of input and output, E.
        num_heads: heads, each of E / num_heads features.
        format, block_size: of projections and scores, as in `mx_quantize`.
        dropout: the share of the attention weights that become zero in training.
        bias: true for projections with a bias.

    Raises:
        MXError: where `num_heads` does not divide `embed_dim`; as `mx_quantize`, for the format.

    Example:
        >>> import torch
        >>> from pt2mx import pychop
        >>> layer = pychop.MXAttention(4, 2, "mxint8", block_size=4, bias=False).eval()
        >>> for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        ...     projection.weight.data = torch.eye(4)
        >>> layer(torch.tensor([[[1.0, 2.4, -0.3, 7.0]]])).detach()  # one token attends to itself
        tensor([[[ 1.0000,  2.3750, -0.3125,  7.0000]]])
    """

    q_proj: MXLinear
    k_proj: MXLinear
    v_proj: MXLinear
    out_proj: MXLinear

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
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, MXLinear(embed_dim, embed_dim, bias, format, block_size=block_size))
        self.dropout = nn.Dropout(dropout)
        self.score_quantizer = MXQuantizerSTE(format, block_size)

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """query: (B, T, E); key, value: (B, S, E), the query where they are None; attn_mask: added to the scores
        (B, heads, T, S) -> (B, T, E)."""
        key, value = (query if x is None else x for x in (key, value))
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, heads, T, head_dim)
            for projection, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        scores = self.score_quantizer(q @ k.transpose(-2, -1) / math.sqrt(self.head_dim))
        if attn_mask is not None:
            scores = scores + attn_mask
        y = self.dropout(torch.softmax(scores, dim=-1)) @ v
        return self.out_proj(y.transpose(1, 2).flatten(-2))


def convert_linear_to_mx(
    module: nn.Module,
    format: Format = "mxfp8_e4m3",
    block_size: int = 32,
    quantize_input: bool = True,
    quantize_output: bool = False,
    inplace: bool = True,
) -> nn.Module:
    """Replace every `nn.Linear` inside a module by an `MXLinear` that holds its parameters, as
    `pychop.convert_linear_to_mx` does.

    Args:
        module: the module. If it is a linear layer itself, it does not change, and the function returns an `MXLinear`
            for it.
        format, block_size: of weights and activations, as in `mx_quantize`.
        quantize_input, quantize_output: as in `MXLinear`.
        inplace: false for a copy of the module.

    Returns:
        The module, or its copy.

    Raises:
        MXError: for another object than a module; as `mx_quantize`, for the format.

    Example:
        >>> import torch
        >>> from pt2mx import pychop
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
        >>> type(pychop.convert_linear_to_mx(model, "mxfp6_e3m2")[0]).__name__
        'MXLinear'
    """
    if not isinstance(module, nn.Module):
        raise MXError(f"expected a torch module, not {type(module).__name__}")
    options = (resolve(format, block_size), quantize_input, quantize_output)
    return _converted(module if inplace else copy.deepcopy(module), *options)


def _converted(module: nn.Module, spec: MXSpec, quantize_input: bool, quantize_output: bool) -> nn.Module:
    if isinstance(module, MXLinear):
        return module
    if not isinstance(module, nn.Linear):
        for name, child in module.named_children():
            setattr(module, name, _converted(child, spec, quantize_input, quantize_output))
        return module
    new = MXLinear(
        *(module.in_features, module.out_features, False, spec),
        quantize_input=quantize_input,
        quantize_output=quantize_output,
        device="meta",
    )
    new.weight, new.bias = module.weight, module.bias
    return new.train(module.training)
