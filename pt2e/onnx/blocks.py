"""Blocks along an axis, in operators of ONNX: a tensor of any rank, of extents that may be dynamic."""

from __future__ import annotations

from dataclasses import dataclass

from pt2mx.pt2e.onnx.function import Function
from pt2mx.spec import MXSpec


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` values along `axis`: -1, or the dimension counted from the front. `length` is the extent, -1
    where it is dynamic."""

    axis: int
    size: int
    length: int

    @classmethod
    def of(cls, spec: MXSpec, length: int) -> Blocks:
        """The blocks of a spec; a single short one is a whole block of its own size."""
        size = min(spec.block_size, length) if length > 0 else spec.block_size
        return cls(spec.axis, size, length)

    @property
    def inner(self) -> int:
        """The dimension of a block's values, beside that of the blocks."""
        return self.axis if self.axis < 0 else self.axis + 1

    @property
    def name(self) -> str:
        """A name that distinct bodies have distinct."""
        if not self._whole:
            extent = f"_n{self.length}" if self.length > 0 else "_any"
            return f"b{self.size}{extent}" + (f"_axis{self.axis}" if self.axis >= 0 else "")
        return f"b{self.size}" + (f"_n{self.length}_axis{self.axis}" if self.axis >= 0 else "")

    @property
    def _whole(self) -> bool:
        """True if no block is short."""
        return self.length > 0 and self.length % self.size == 0

    def split(self, f: Function, x: str) -> str:
        """x: (..., n, ...) -> (..., blocks, block, ...), the last block filled with zeros. Of whole blocks the
        dimensions before the last axis, or those behind another, are one."""
        if self._whole:
            before = [0] * self.axis + [self.length // self.size] if self.axis >= 0 else [-1]
            return f.op("Reshape", x, [*before, self.size] + [-1] * (self.axis >= 0))
        padded = f.op("Pad", x, f.op("Concat", [0], self._missing(f, x), axis=0), 0.0, [self.axis])
        return f.op("Reshape", padded, self.shape(f, padded, [-1, self.size]))

    def split_scale(self, f: Function, scale: str) -> str:
        """scale: (..., blocks, ...) -> as `split` gives values, with one in the place of a block's values."""
        if self._whole:
            return Blocks(self.axis, 1, self.length // self.size).split(f, scale)
        return f.op("Unsqueeze", scale, [self.inner])

    def join(self, f: Function, blocks: str, x: str) -> str:
        """(..., blocks, block, ...) -> the shape of x."""
        if self._whole:
            return f.op("Reshape", blocks, f.op("Shape", x))
        padded = f.op("Reshape", blocks, self.shape(f, x, [-1]))
        return f.op("Slice", padded, [0], self._extent(f, x), [self.axis])

    def shape(self, f: Function, x: str, along: list[int]) -> str:
        """The shape of x with `along` in the place of the axis."""
        behind = [] if self.axis == -1 else [f.op("Shape", x, start=self.axis + 1)]
        return f.op("Concat", f.op("Shape", x, end=self.axis), along, *behind, axis=0)

    def _missing(self, f: Function, x: str) -> str | list[int]:
        """The number of values that the last block lacks, (1,)."""
        if self.length > 0:
            return [-self.length % self.size]
        return f.op("Mod", f.op("Neg", self._extent(f, x)), [self.size])

    def _extent(self, f: Function, x: str) -> str | list[int]:
        """The extent along the axis, (1,)."""
        if self.length > 0:
            return [self.length]
        if self.axis == -1:
            return f.op("Shape", x, start=-1)
        return f.op("Shape", x, start=self.axis, end=self.axis + 1)
