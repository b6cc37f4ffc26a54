"""Calibration observers for matmul inputs (`MXHessianObserver`) and embedding indices (`MXIndexObserver`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

#: rows that one batch adds at most, taken evenly: of a convolution each position of an image is a row
ROWS = 8192
#: columns whose products are summed together at most; of more, products of columns of different parts are left out
_COLUMNS = 4096
#: and at least, however small the memory
FEWEST_COLUMNS = 32
#: the fraction whose multiples lie evenly in [0, 1), however many
_GOLDEN = (5**0.5 - 1) / 2
#: rows of the mean expert, of K columns times this, that are added to those of each expert, and how many rows of its
#: own one of them stands for (16 experts, FP4, 30 to 500 rows for 256 columns each: errors of other rows are 0.99 to
#: 0.83 times those of each by itself; of an expert's hidden channels, which have nothing in common, 0.94 to 1.03 times)
_MEAN_ROWS, _ROWS_OF_MEAN = 0.5, 0.25
#: (groups, rows, K), or (1, rows, K) of each group, where groups have rows of their own number
Rows = Tensor | Sequence[Tensor]


class MXHessianObserver(nn.Module):
    """Adds up what products of a tensor with a weight depend on, and passes the tensor through.

    The sums are in float32: `parts`, of products of columns, (groups, K', K') for each part of K' columns, on the
    tensor's device or on `home`; `amax`, the largest absolute value of each column, (groups, K), on the former;
    `count`, the rows that were seen, and `counts`, those of each group, (groups,).

    Args:
        rows: tensor -> (groups, rows, K), the rows that meet the weight's columns, or (1, rows, K) of each group. It
            gets all that the observer is called with.
        line: columns that blocks of the weight do not cross, which stay in one part where it holds them.
        block: columns of a block, which stay in one part.
        columns: columns of a part at most; None: 4,096.
        home: the device that keeps `parts`, the host where an accelerator's memory is short; None: the tensor's.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e.optimize.observers import MXHessianObserver
        >>> observer = MXHessianObserver(lambda x: x.unsqueeze(0), line=2)
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> observer(x) is x
        True
        >>> observer.parts[0]  # x.T @ x
        tensor([[[10., 14.],
                 [14., 20.]]])
        >>> observer.count, observer.amax
        (2, tensor([[3., 4.]]))
    """

    def __init__(
        self,
        rows: Callable[..., Rows],
        line: int,
        block: int = 32,
        columns: int | None = None,
        home: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.rows, self.line, self.block, self.home = rows, line, block, home
        self.columns = _COLUMNS if columns is None else columns
        self.count = 0
        self.counts = torch.zeros(0, dtype=torch.int64)
        self.parts: list[Tensor] = []
        self.amax: Tensor | None = None

    @torch.no_grad()
    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        found = self.rows(x.detach(), *beside)
        groups = [found] if isinstance(found, Tensor) else found
        if any(rows.shape[1] for rows in groups):
            first = 0
            amax = self._begun(sum(map(len, groups)), groups[0])
            for rows in groups:
                self._add(rows, amax, slice(first, first + len(rows)))
                first += len(rows)
        return x

    def _begun(self, groups: int, rows: Tensor) -> Tensor:
        """`amax`, and sums to which rows can be added."""
        if self.amax is None:
            k, device = rows.shape[2], rows.device
            size = part_size(k, self.line, self.block, self.columns)
            widths = [min(size, k - first) for first in range(0, k, size)]
            self.parts = [torch.zeros(groups, width, width, device=self.home or device) for width in widths]
            self.amax = torch.zeros(groups, k, device=device)
            self.counts = torch.zeros(groups, dtype=torch.int64)
        return self.amax

    def _add(self, rows: Tensor, amax: Tensor, own: slice) -> None:
        """Add the rows of some of the groups."""
        if rows.shape[1] == 0:
            return
        if rows.shape[1] > ROWS:
            rows = rows[:, sample(rows.shape[1], rows.device)]
        rows = rows.float()
        for part, columns in zip(self.parts, rows.split([part.shape[1] for part in self.parts], 2), strict=True):
            here = part.device == rows.device
            sums = part[own] if here else torch.zeros_like(part[own], device=rows.device)
            sums.baddbmm_(columns.mT, columns)  # in place: autocast lets it alone
            if not here:
                part[own] += sums.to(part.device)
        torch.maximum(amax[own], rows.abs().amax(1), out=amax[own])
        self.counts[own] += rows.shape[1]
        self.count += rows.shape[1]

    def mean_squares(self) -> Tensor:
        """Return the mean of the squares of each column, (groups, K)."""
        squares = torch.cat([part.diagonal(dim1=1, dim2=2) for part in self.parts], 1)
        return squares / self.counts.clamp(min=1).unsqueeze(1).to(squares.device)


class Size(NamedTuple):
    """The extents of an observer's sums."""

    groups: int
    k: int
    line: int
    block: int


def sample(total: int, device: torch.device) -> Tensor:
    """Return the numbers of `ROWS` rows of `total`: one of each of as many equal stretches, at a place that changes
    from one to the next, for rows may repeat with a period."""
    number = torch.arange(ROWS, dtype=torch.float64)
    return ((number + (number * _GOLDEN).frac()) * (total / ROWS)).long().to(device)


def part_size(k: int, line: int, block: int, columns: int) -> int:
    """Return the columns of a part, about `columns` at most: all, or as many whole lines as these hold, or whole blocks
    of one line. Where there are several lines, no part reaches into two."""
    if k <= columns:
        return k
    if line <= columns:
        return columns // line * line
    whole = min(block, line)
    size = max(columns // whole, 1) * whole
    return size if k == line else next((n for n in range(size, 0, -whole) if line % n == 0), line)


def with_mean_expert(parts: Sequence[Tensor], counts: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the sums of experts, and the rows that they stand for, (groups,), with some rows of the mean expert added
    to each: many experts see few rows of their own."""
    rows = _MEAN_ROWS * sum(part.shape[-1] for part in parts)
    share = rows / max(int(counts.sum()), 1)
    return [part + share * part.sum(0) for part in parts], counts + _ROWS_OF_MEAN * rows


def bytes_of_sums(size: Size, columns: int) -> int:
    """Return the bytes of an observer's sums, in parts of at most so many columns."""
    part = part_size(*size[1:], columns)
    whole, rest = divmod(size.k, part)
    return 4 * size.groups * (whole * part**2 + rest**2)


def columns_within(budget: int, sizes: Iterable[Size]) -> int:
    """Return the most columns of a part, a power of two from 32 to 4,096, with which the sums of all observers take at
    most so many bytes; 32 where none is small enough."""
    sizes = list(sizes)
    columns = _COLUMNS
    while columns > FEWEST_COLUMNS and sum(bytes_of_sums(size, columns) for size in sizes) > budget:
        columns //= 2
    return columns


class MXIndexObserver(nn.Module):
    """Counts the rows of a table that indices name, and passes the indices through.

    `counts` is (rows,) int64, on the device of the indices.

    Args:
        rows: rows of the table.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e.optimize.observers import MXIndexObserver
        >>> observer = MXIndexObserver(rows=4)
        >>> ids, mask = torch.tensor([[1, 3, 0]]), torch.tensor([[1, 1, 0]])
        >>> observer(ids, mask) is ids
        True
        >>> observer.counts
        tensor([0, 1, 0, 1])
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.counts = torch.zeros(rows, dtype=torch.int64)

    def forward(self, indices: Tensor, mask: Tensor | None = None) -> Tensor:
        read = indices if mask is None else indices[mask != 0]
        read = read[(read >= 0) & (read < self.rows)]  # of others the embedding says that they are none
        self.counts = self.counts.to(read.device) + torch.bincount(read, minlength=self.rows)
        return indices
