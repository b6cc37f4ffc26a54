"""Layers of eager models whose weights stay packed: `MXLinear`, `MXEmbedding`."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from pt2mx.functional import dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.kernels.packing import packed_length
from pt2mx.ops.linear import LinearMX
from pt2mx.pt2e.checkpoints.select_weights import LayerSpecs, as_matrix
from pt2mx.spec import MXSpec


class PackedWeight(nn.Module):
    """The weight of a layer, (rows, columns), as codes and scales in blocks along the columns.

    Args:
        rows, columns: the shape of the weight.
        spec: its format.
        dtype: the dtype of its dequantized values, which `to` and `half` change as for a parameter.
        device: the device of the buffers, which are empty until `pack`.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    _float: Tensor

    def __init__(
        self, rows: int, columns: int, spec: MXSpec, dtype: torch.dtype, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.rows, self.columns, self.spec = rows, columns, spec
        widths = {
            "weight_packed": packed_length(columns, spec.element.bits),
            "weight_scale": -(-columns // spec.block_size),
        }
        for name, width in widths.items():
            self.register_buffer(name, torch.empty(rows, width, dtype=torch.uint8, device=device))
        self.register_buffer("_float", torch.empty(0, dtype=dtype, device=device), persistent=False)

    @torch.no_grad()
    def pack(self, weight: Tensor) -> None:
        """Quantize a weight, (rows, columns) float, into the buffers, on its device."""
        self.weight_scale, self.weight_packed = quantize_mx(weight, self.spec)
        self._float = weight.new_empty(0)

    @property
    def weight(self) -> Tensor:
        """The dequantized values, (rows, columns), computed at each access."""
        return self._values(self.weight_packed, self.weight_scale)

    def _values(self, packed: Tensor, scale: Tensor) -> Tensor:
        return dequantize_mx(packed, scale, self.spec, target_dtype=self._float.dtype, length=self.columns)

    def extra_repr(self) -> str:
        return f"{self.columns}, {self.rows}, weight={self.spec}"


class MXLinear(PackedWeight):
    """`nn.Linear` on the operator `linear_mx`.

    Args:
        in_features, out_features: as for `nn.Linear`.
        specs: the formats of the weight and of the input, which each call fake-quantizes where it has a format.
        bias: (out_features,) float, shared with the caller, or None.
        dtype, device: of the weight.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.pt2e.checkpoints.eager_modules import MXLinear
        >>> from pt2mx.pt2e.checkpoints.select_weights import LayerSpecs
        >>> linear = MXLinear(4, 4, LayerSpecs(pt2mx.parse("mxfp4"), pt2mx.parse("mxfp4")))
        >>> linear.pack(torch.eye(4))
        >>> linear(torch.tensor([1.0, 2.9, -5.9, 0.3]))
        tensor([ 1.0000,  3.0000, -6.0000,  0.5000])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        specs: LayerSpecs,
        bias: nn.Parameter | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(out_features, in_features, specs.weight, dtype, device)
        self.in_features, self.out_features, self.activation = in_features, out_features, specs.activation
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        if self.activation is not None:
            x = fake_quantize_mx(x, self.activation)
        return LinearMX(x, self.weight_packed, self.weight_scale, self.bias, self.spec, 0).call()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}, bias={self.bias is not None}"


class MXEmbedding(PackedWeight):
    """`nn.Embedding` that gathers packed rows and dequantizes them, with the attributes that models read."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        spec: MXSpec,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, spec, dtype, device)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (...) integers -> (..., columns)."""
        return self._values(self.weight_packed[ids], self.weight_scale[ids])


def packed_layer(layer: nn.Module, specs: LayerSpecs) -> PackedWeight:
    """Return the packed layer, still without values, for an `nn.Linear`, an `nn.Embedding` or a Conv1D of transformers.

    It shares the bias."""
    weight = as_matrix(layer, cast(Tensor, layer.weight))
    rows, columns = weight.shape
    if isinstance(layer, nn.Embedding):
        embedding = MXEmbedding(rows, columns, specs.weight, layer.padding_idx, weight.dtype, weight.device)
        return embedding.train(layer.training)
    linear = MXLinear(columns, rows, specs, layer.bias, weight.dtype, weight.device)  # type: ignore[arg-type]
    return linear.train(layer.training)
