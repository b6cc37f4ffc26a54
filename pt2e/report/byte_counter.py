"""The bytes of the rows of a report: of each tensor of the float model no more than it has."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from pt2mx.pt2e.report.sources import Source
from pt2mx.pt2e.stored_bits import packed_bytes
from pt2mx.spec import MXSpec


class Counted(NamedTuple):
    """The values of a constant operand, and its bytes in the float model and in the converted one."""

    values: int
    before: int
    after: int


class ByteCounter:
    """Counts operands in the order of execution; what an earlier one counted, a later one does not."""

    def __init__(self) -> None:
        self._seen: set[object] = set()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def add(self, value: Tensor, spec: MXSpec | None, sources: list[Source]) -> Counted:
        """Count an operand of one or several sources, each of the shape of `value`; packed in `spec`, or in float."""
        each = [self._add(value, spec, source) for source in sources]
        return Counted(*map(sum, zip(Counted(0, 0, 0), *each, strict=True)))

    def _add(self, value: Tensor, spec: MXSpec | None, source: Source) -> Counted:
        values = 0 if source.name in self._seen else value.numel()
        before = self._take(value, source, "before")
        if spec is None:
            after = self._take(value, source, "after")
        else:
            after = 0 if (source.name, spec) in self._seen else packed_bytes(value.shape, spec)
        self._seen |= {source.name, (source.name, spec)}
        return Counted(values, before, after)

    def _take(self, value: Tensor, source: Source, when: str) -> int:
        """Count the bytes of the tensors behind an operand that are left; of a single tensor, which the operand may be
        a part of, those of as many values as the operand has."""
        taken = 0
        for name, size in source.tensors.items():
            values = min(value.numel(), size.values) if len(source.tensors) == 1 else size.values
            new = min(size.bytes * values // max(size.values, 1), size.bytes - self._bytes[name, when])
            self._bytes[name, when] += new
            taken += new
        return taken
