"""`MXIndexObserver`: what calibration shows of the indices of an embedding, how often each row is read."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MXIndexObserver(nn.Module):
    """Counts the rows of a table that indices name, and passes the indices through.

    `counts` is (rows,) int64, on the device of the indices.

    Args:
        rows: rows of the table.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e.optimize.index_observer import MXIndexObserver
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
