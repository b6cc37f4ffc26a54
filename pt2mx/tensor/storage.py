"""The storage of an `MXTensor`: codes and scales, their size, and shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pt2mx.analysis.measure import MXStorage
from pt2mx.formats import ELEMENTS, ElementFormat
from pt2mx.kernels.packing import packed_length, unpacked_length
from pt2mx.scale_formats import SCALE_FORMATS
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from typing_extensions import Self


class PackedStorage:
    """A base of `MXTensor`, which reports the `shape`, `dtype` and `device` of its values."""

    qdata: Tensor
    scale: Tensor
    block_size: int
    axis: int
    # strings, so that a checkpoint holds plain types
    _element_name: str
    # the defaults are for checkpoints of older versions
    _scale_name: str = "e8m0"
    block_rows: int = 1
    tensor_scale: Tensor | None = None

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def elem_dtype(self) -> ElementFormat:
        """The element format."""
        return ELEMENTS[self._element_name]

    @property
    def spec(self) -> MXSpec:
        """The element, scale format, blocks and axis (from the front); codes do not tell how they were rounded."""
        scales, blocks = SCALE_FORMATS[self._scale_name], (self.block_size, self.axis)
        return MXSpec(self.elem_dtype, *blocks, scale_format=scales, block_rows=self.block_rows)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The plain tensors by name: `qdata`, `scale`, and `tensor_scale` where the scale format has one."""
        tensors = {"qdata": self.qdata, "scale": self.scale}
        return tensors if self.tensor_scale is None else {**tensors, "tensor_scale": self.tensor_scale}

    def statistics(self) -> dict[str, object]:
        """Return size and compression, as pychop's `MXTensor.statistics()`; `pt2mx.mx_statistics` also measures the
        loss.

        Returns:
            `format`, `exp_bits` and `sig_bits` of the element (an integer has no exponent bits), `block_size`,
            `scale_exp_bits`, `scale_sig_bits`, `original_shape`, `num_blocks`, `total_elements`, `bits_per_element`
            with its share of the scale, and `compression_ratio_fp32` and `compression_ratio_fp16`.

        Example:
            >>> import torch, pt2mx
            >>> statistics = pt2mx.MXTensor.to_mx(torch.ones(4, 64), "mxfp4").statistics()
            >>> statistics["num_blocks"], statistics["bits_per_element"]
            (8, 4.25)
        """
        return MXStorage.of(self.shape, self.spec).to_dict()

    def is_shared(self) -> bool:
        """Return True if codes and scales are in shared memory, as `torch.Tensor.is_shared`.

        Returns:
            True or False.

        Example:
            >>> import torch, pt2mx
            >>> pt2mx.MXTensor.to_mx(torch.ones(4), "mxfp4").is_shared()
            False
        """
        return all(part.is_shared() for part in self.parts.values())

    def share_memory_(self) -> Self:
        """Move codes and scales to shared memory, in place, as `torch.Tensor.share_memory_`.

        Returns:
            This tensor.

        Example:
            >>> import torch, pt2mx
            >>> pt2mx.MXTensor.to_mx(torch.ones(4), "mxfp4").share_memory_().is_shared()
            True
        """
        for part in self.parts.values():
            part.share_memory_()
        return self

    def holds_whole_blocks(self, length: int) -> bool:
        """Return True if the first `length` values along the axis are whole blocks that end where a byte ends.

        Args:
            length: a count of values.

        Returns:
            True or False.

        Example:
            >>> import torch, pt2mx
            >>> x = pt2mx.MXTensor.to_mx(torch.ones(64), "mxfp4")
            >>> x.holds_whole_blocks(32), x.holds_whole_blocks(16)
            (True, False)
        """
        bits = self.elem_dtype.bits
        return length % self.block_size == 0 and unpacked_length(packed_length(length, bits), bits) == length

    @property
    def description(self) -> str:
        """The shape, element, blocks, axis and scale format, for messages."""
        scales = "" if self._scale_name == "e8m0" else f", {self._scale_name} scales"
        return (
            f"an MXTensor of shape {tuple(self.shape)} ({self._element_name} in blocks of {self.spec.blocks} along "
            f"dimension {self.axis}{scales})"
        )

    def __repr__(self) -> str:
        rows = "" if self.block_rows == 1 else f"block_rows={self.block_rows}, "
        scales = "" if self._scale_name == "e8m0" else f"scale_format={self._scale_name}, "
        return (
            f"MXTensor(shape={tuple(self.shape)}, elem_dtype={self._element_name}, block_size={self.block_size}, "
            f"{rows}{scales}axis={self.axis}, dtype={self.dtype}, device={str(self.device)!r})"
        )
