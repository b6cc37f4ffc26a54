"""The primitives from which the definition of MX quantization is made, as a protocol.

A compiler that needs other code for the same bits gives a module of its own (`pt2mx.kernels.inductor`).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pt2mx.formats import ElementFormat


class Prims(Protocol):
    """An argument of `pt2mx.kernels.reference`: a module such as `pt2mx.kernels.elements`, which is the definition."""

    def realize(self, shared: Tensor) -> Tensor:
        """Return what the values of a block share, (..., blocks, 1, ...): to compute once a block."""

    def realize_if_costly(self, x: Tensor) -> Tensor:
        """Return x, which both the scale of a block and its values need: to compute once where that is costly."""

    def from_blocks(self, blocks: Tensor, axis: int, length: int) -> Tensor:
        """(..., blocks, block, ...) -> (..., length, ...), the filling of the last blocks cut off."""

    def times_scales(self, blocks: Tensor, scale: Tensor) -> Tensor:
        """blocks: fp32, scale: (..., blocks, 1, ...) int32, E8M0 -> the values that they stand for."""

    def scale_bytes(self, exponent: Tensor, finite: Tensor) -> Tensor:
        """exponent: int32, and whether the block is finite -> E8M0, uint8."""

    def round_to_element(
        self, v: Tensor, element: ElementFormat, rounding: str, random: Tensor | None = None
    ) -> Tensor:
        """v: fp32 in units of the block's scale -> a neighbouring value of the element, saturated."""

    @property
    def decode(self) -> Decode:
        """codes: int32 in [0, 2**bits) -> their values in fp32."""


class Decode(Protocol):
    """A decoder of codes; one may take more arguments that have defaults."""

    def __call__(self, codes: Tensor, element: ElementFormat) -> Tensor:
        """codes: int32 in [0, 2**bits) -> their values in fp32."""
