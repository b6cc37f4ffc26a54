"""`MXHessianObserver`: what calibration shows of the input of a product, sums of squares and of products of columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

#: rows that one batch adds at most, taken evenly: of a convolution each position of an image is a row
ROWS = 8192
#: columns whose products are summed together; of more, products of columns of different parts are left out
_COLUMNS = 4096


class MXHessianObserver(nn.Module):
    """Adds up what products of a tensor with a weight depend on, and passes the tensor through.

    The sums are in float32, on the tensor's device, and hold at most 4,096 x 4,096 values a part of the columns.

    Args:
        rows: tensor -> (groups, rows, K), the rows that meet the weight's columns.
        line: columns that blocks of the weight do not cross, which stay in one part where it holds them.
        block: columns of a block, which stay in one part.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e.optimize.hessian_observer import MXHessianObserver
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

    def __init__(self, rows: Callable[[Tensor], Tensor], line: int, block: int = 32) -> None:
        super().__init__()
        self.rows, self.line, self.block = rows, line, block
        self.count = 0
        self.parts: list[Tensor] = []
        self.amax: Tensor | None = None

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x.detach())
        if rows.shape[1] == 0:
            return x
        if rows.shape[1] > ROWS:
            rows = rows[:, sample(rows.shape[1], rows.device)]
        rows = rows.float()
        found = [part.mT @ part for part in rows.split(part_size(rows.shape[2], self.line, self.block), 2)]
        amax = rows.abs().amax(1)
        self.parts = [a + b for a, b in zip(self.parts, found, strict=True)] if self.parts else found
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        self.count += rows.shape[1]
        return x

    def mean_squares(self) -> Tensor:
        """Return the mean of the squares of each column, (groups, K)."""
        return torch.cat([part.diagonal(dim1=1, dim2=2) for part in self.parts], 1) / max(self.count, 1)


def sample(total: int, device: torch.device) -> Tensor:
    """Return the numbers of `ROWS` rows of `total`, taken evenly."""
    return (torch.arange(ROWS, device=device) * (total / ROWS)).long()


def part_size(k: int, line: int, block: int) -> int:
    """Return the columns of a part: all, as many whole lines as it holds, or as many whole blocks of one line."""
    if k <= _COLUMNS:
        return k
    whole = line if line <= _COLUMNS else min(block, line)
    return max(_COLUMNS // whole, 1) * whole
