"""The blocks of GGUF types as codes and scales of pt2mx, and back: the same values in another order of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.models.weight_formats import NVFP4, spec_of
from pt2mx.spec import MXSpec

#: the type that may have a scale of the whole tensor
NVFP4_TYPE = "NVFP4"


@dataclass(frozen=True)
class BlockType:
    """A GGUF type whose values are codes times a scale.

    A block of the file begins with the scales of its groups, and continues with the codes of each group. Codes of four
    bits hold the first half of a group in the low bits of its bytes, and the second half in the high bits.

    Args:
        name: the name of the type.
        form: the format of the weight, as in `weight_formats`; a group is a block of it.
        groups: groups in a block of the file.
        flipped: bits of each code that the file holds inverted.
        other_scales: codes of scales, from the first to the last, that mean other numbers in the file and here.
    """

    name: str
    form: str
    groups: int = 1
    flipped: int = 0
    other_scales: tuple[int, int] | None = None

    @property
    def spec(self) -> MXSpec:
        """The format of the weight."""
        return spec_of(self.form)

    @property
    def values(self) -> int:
        """Values in a block of the file."""
        return self.spec.block_size * self.groups

    def to_codes(self, name: str, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """blocks: (..., bytes of a row) uint8 -> codes, (..., bytes of K) uint8, and scales, (..., K / group) of the
        dtype of the scale format. A scale that means another number in the file raises an `MXError`."""
        dtype = self.spec.scale_dtype
        split = self.groups * dtype.itemsize
        whole = blocks.unflatten(-1, (-1, split + self._code_bytes * self.groups))
        scale = whole[..., :split].flatten(-2).contiguous().view(dtype)
        self._check(name, scale)
        codes = whole[..., split:].unflatten(-1, (self.groups, self._code_bytes))
        if self.spec.element.bits == 4:
            nibbles = torch.cat((codes & 15, codes >> 4), -1) ^ self.flipped
            codes = nibbles[..., 0::2] | nibbles[..., 1::2] << 4  # the first of two codes in the low bits
        return codes.flatten(-3).contiguous(), scale

    def to_blocks(self, name: str, data: Tensor, scale: Tensor) -> Tensor:
        """Return the blocks of a tensor, the inverse of `to_codes`, for rows that are whole blocks."""
        self.check_columns(name, scale.shape[-1] * self.spec.block_size)
        self._check(name, scale)
        codes = data.unflatten(-1, (-1, self.groups, self._code_bytes))
        if self.spec.element.bits == 4:
            nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2) ^ self.flipped
            low, high = nibbles.chunk(2, -1)
            codes = low | high << 4
        scales = scale.contiguous().view(torch.uint8).unflatten(-1, (codes.shape[-3], -1))
        return torch.cat((scales, codes.flatten(-2)), -1).flatten(-2)

    def check_columns(self, name: str, columns: int) -> None:
        """Raise an `MXError` for rows that are no whole blocks of the file."""
        if columns % self.values:
            raise MXError(
                f"{name} has {columns} columns, and rows of {self.name} are whole blocks of {self.values} values: "
                "leave it in high precision"
            )

    @property
    def _code_bytes(self) -> int:
        """Bytes of codes in a group."""
        return self.spec.block_size * self.spec.element.bits // 8

    def _check(self, name: str, scale: Tensor) -> None:
        if self.other_scales is None:  # floats
            differs = ~scale.isfinite()
        else:
            first, last = self.other_scales
            differs = (scale >= first) & (scale <= last)
        if bool(differs.any()):
            raise MXError(
                f"{name} has a block with the scale {scale[differs][0].item()}, which means another number in "
                f"{self.name} than in {self.form}: make the weight finite"
            )


#: the GGUF types that are codes and scales, by name
BLOCK_TYPES: dict[str, BlockType] = {
    row.name: row
    for row in (
        # 255 is NaN here, and 2**128 in the file
        BlockType("MXFP4", "fp4_e2m1", other_scales=(255, 255)),
        # 127 is NaN here, and 0 in the file, which ignores the sign
        BlockType(NVFP4_TYPE, NVFP4, groups=4, other_scales=(127, 255)),
        BlockType("Q8_0", "int8{32}(f16)"),
        BlockType("Q4_0", "int4_full{32}(f16)", flipped=8),
    )
}
