"""Blocks along an axis, in operators of ONNX: a tensor of any rank, of extents that may be dynamic."""

from __future__ import annotations

from dataclasses import dataclass

from pt2mx.pt2e.onnx.function import Function, Input
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
            return f"b{self.size}{extent}" + (f"_axis{self.axis}" if self.axis != -1 else "")
        return f"b{self.size}" + (f"_n{self.length}_axis{self.axis}" if self.axis != -1 else "")

    @property
    def _whole(self) -> bool:
        """True if no block is short."""
        return self.length > 0 and self.length % self.size == 0

    def split(self, f: Function, x: str) -> str:
        """x: (..., n, ...) -> (..., blocks, block, ...), the last block filled with zeros. Of whole blocks along the
        last axis the dimensions before are one."""
        if self._whole and self.axis == -1:
            return f.op("Reshape", x, [-1, self.size])
        extent, count, filled = self._sizes(f, x)
        if not self._whole:
            x = f.op("Pad", x, f.op("Concat", [0], f.op("Sub", filled, extent), axis=0), "", [self.axis])
        return self.reshape(f, x, x, count, [self.size])

    def split_scale(self, f: Function, scale: str) -> str:
        """scale: (..., blocks, ...) -> as `split` gives values, with one in the place of a block's values."""
        if self._whole:
            return Blocks(self.axis, 1, self.length // self.size).split(f, scale)
        return f.op("Unsqueeze", scale, [self.inner])

    def join(self, f: Function, blocks: str, x: str) -> str:
        """(..., blocks, block, ...) -> the shape of x."""
        if self._whole:
            return f.op("Reshape", blocks, f.op("Shape", x), allowzero=1)
        extent, _, filled = self._sizes(f, x)
        return f.op("Slice", self.reshape(f, blocks, x, filled), [0], extent, [self.axis])

    def reshape(self, f: Function, x: str, like: str, *along: Input) -> str:
        """x in the shape of another tensor, with `along` in the place of the axis. No extent is left to be inferred:
        that is impossible where another one is 0."""
        behind = [] if self.axis == -1 else [f.op("Shape", like, start=self.axis + 1)]
        shape = f.op("Concat", f.op("Shape", like, end=self.axis), *along, *behind, axis=0)
        return f.op("Reshape", x, shape, allowzero=1)

    def extent(self, f: Function, x: str) -> str:
        """The extent of x along the axis, (1,)."""
        if self.axis == -1:
            return f.op("Shape", x, start=-1)
        return f.op("Shape", x, start=self.axis, end=self.axis + 1)

    def _sizes(self, f: Function, x: str) -> tuple[Input, Input, Input]:
        """The extent of x along the axis, the number of blocks, and of the values that fill them, each (1,)."""
        if self.length > 0:
            count = -(-self.length // self.size)
            return [self.length], [count], [count * self.size]
        extent = self.extent(f, x)
        blocks = f.op("Div", f.op("Add", extent, [self.size - 1]), [self.size])
        return extent, blocks, f.op("Mul", blocks, [self.size])
