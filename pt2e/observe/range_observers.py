"""Observers that also collect the range of a tensor's values: minimum and maximum, their moving averages, a histogram.

The observers of these names in torch.ao compute a scale from the range. MX scales come from the values of each block,
so here the range changes no output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.pt2e.observe.observer import MXObserver

#: meta key of a `dequantize_mx` node: the `ValueRange` that was observed of its tensor
RANGE_KEY = "mx_range"

#: the exponent of a histogram's limit before the first value; the smallest fp32 number has -148
_NO_EXPONENT = -200


@dataclass(frozen=True)
class ValueRange:
    """The range of a tensor's finite values.

    Args:
        least, largest: one value, or one per channel.
        limit: the largest magnitude that the bins of a histogram cover; None without a histogram.
        histogram: counts of the values in equal bins from `-limit` to `limit`.
    """

    least: tuple[float, ...]
    largest: tuple[float, ...]
    limit: float | None = None
    histogram: tuple[int, ...] = ()


class MXMinMaxObserver(MXObserver):
    """Record the smallest and the largest finite value too, `min_val` and `max_val`.

    Both are (1,) float32, and Inf and -Inf before the first value. Follows `MinMaxObserver` and
    `PerChannelMinMaxObserver` of torch.ao.

    Args:
        qscheme: as in `MXObserver`.
        ch_axis: the channel dimension, which may be negative: one range per channel, and `min_val` is (channels,).
            None: one range for all values.
        eps, reduce_range: ignored; torch.ao's observers compute a scale with them.
        options: `fake_quant` and `observe`, as in `MXObserver`.

    Raises:
        MXError: for an axis that is not an integer, or out of range for a tensor.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.pt2e.observe.qspec import mx_qscheme
        >>> from pt2mx.pt2e.observe.range_observers import MXMinMaxObserver
        >>> observer = MXMinMaxObserver(mx_qscheme(pt2mx.MXSpec("mxfp8")), ch_axis=0)
        >>> _ = observer(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
        >>> observer.value_range
        ValueRange(least=(-2.0, 3.0), largest=(1.0, 4.0), limit=None, histogram=())
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(
        self,
        qscheme: tuple,
        *,
        ch_axis: int | None = None,
        eps: float | None = None,
        reduce_range: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(qscheme, **options)
        if isinstance(ch_axis, bool) or not isinstance(ch_axis, int | None):
            raise MXError(f"ch_axis={ch_axis!r} must be an integer, or None for one range of all values")
        self.ch_axis = ch_axis
        self.register_buffer("min_val", torch.full((1,), torch.inf))
        self.register_buffer("max_val", torch.full((1,), -torch.inf))

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Add a tensor to the statistics.

        Args:
            x: (..., n, ...) float32, float16 or bfloat16.
        """
        super().collect(x)
        if x.numel():
            x = self._by_channel(x.detach().float())
            least, largest = (torch.where(x.isfinite(), x, sign * torch.inf) for sign in (1, -1))
            self.min_val, self.max_val = self.combined(least.amin(1), largest.amax(1))

    def combined(self, least: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the range so far, extended by a batch.

        Args:
            least, largest: (1,) or (channels,) float32, the range of the batch.

        Returns:
            The new `min_val` and `max_val`, of the same shape.
        """
        return torch.minimum(self.min_val, least), torch.maximum(self.max_val, largest)

    def reset_statistics(self) -> None:
        """Reset the statistics."""
        super().reset_statistics()
        self.min_val = torch.full_like(self.min_val, torch.inf)
        self.max_val = torch.full_like(self.max_val, -torch.inf)

    @property
    def value_range(self) -> ValueRange | None:
        """The range so far; None before the first finite value."""
        if bool(self.min_val.isinf().all()):
            return None
        return ValueRange(tuple(self.min_val.tolist()), tuple(self.max_val.tolist()))

    def statistics_meta(self) -> dict[str, object]:
        """Return the meta of `MXObserver.statistics_meta`, and the range.

        Returns:
            `QuantizationStatistics` under `STATISTICS_KEY`; the `ValueRange`, where there is one, under `RANGE_KEY`.
        """
        seen = self.value_range
        return super().statistics_meta() | ({} if seen is None else {RANGE_KEY: seen})

    def _by_channel(self, x: Tensor) -> Tensor:
        """x: (...) -> (channels, values), or (1, values) where there is one range of all."""
        if self.ch_axis is None:
            return x.reshape(1, -1)
        if not -x.dim() <= self.ch_axis < x.dim():
            raise MXError(f"ch_axis={self.ch_axis} is out of range for a tensor of shape {tuple(x.shape)}")
        return x.movedim(self.ch_axis, 0).reshape(x.shape[self.ch_axis], -1)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        for name in ("min_val", "max_val"):  # a new observer does not know the number of channels yet
            if prefix + name in state_dict:
                setattr(self, name, torch.empty_like(state_dict[prefix + name], device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *args)


class MXMovingAverageMinMaxObserver(MXMinMaxObserver):
    """Record the moving averages of the smallest and the largest value of the batches.

    The first batch sets the averages; each later one moves them by `averaging_constant` times their distance to its own
    values. Follows `MovingAverageMinMaxObserver` of torch.ao.

    Args:
        qscheme, options: as in `MXMinMaxObserver`.
        averaging_constant: above 0 and at most 1.

    Raises:
        MXError: for a constant that is not above 0 and at most 1.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.pt2e.observe.qspec import mx_qscheme
        >>> from pt2mx.pt2e.observe.range_observers import MXMovingAverageMinMaxObserver
        >>> observer = MXMovingAverageMinMaxObserver(mx_qscheme(pt2mx.MXSpec("mxfp8")), averaging_constant=0.5)
        >>> for largest in (2.0, 4.0):
        ...     _ = observer(torch.tensor([0.0, largest]))
        >>> observer.max_val
        tensor([3.])
    """

    def __init__(self, qscheme: tuple, *, averaging_constant: float = 0.01, **options: Any) -> None:
        super().__init__(qscheme, **options)
        if isinstance(averaging_constant, bool) or not isinstance(averaging_constant, int | float):
            raise MXError(f"averaging_constant={averaging_constant!r} must be a number above 0 and at most 1")
        if not 0 < averaging_constant <= 1:
            raise MXError(f"averaging_constant={averaging_constant!r} must be above 0 and at most 1")
        self.averaging_constant = averaging_constant

    def combined(self, least: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the averages, moved by a batch.

        Args:
            least, largest: (1,) or (channels,) float32, the range of the batch.

        Returns:
            The new `min_val` and `max_val`, of the same shape.
        """
        return self._moved(self.min_val, least), self._moved(self.max_val, largest)

    def _moved(self, average: Tensor, seen: Tensor) -> Tensor:
        """Return `seen` before the first average, and the average for a batch without a finite value."""
        moved = torch.where(average.isinf(), seen, average + self.averaging_constant * (seen - average))
        return torch.where(seen.isinf(), average, moved)


class MXHistogramObserver(MXMinMaxObserver):
    """Count the finite values in equal bins from `-limit` to `limit` too.

    `limit` is the smallest power of two above every magnitude so far. When it grows, adjacent bins are merged, so the
    counts do not depend on the order of the batches. Follows `HistogramObserver` of torch.ao.

    Args:
        qscheme, options: as in `MXMinMaxObserver`.
        bins: an even number, 2 to 2**24.

    Raises:
        MXError: for another number of bins.

    Example:
        >>> import torch, pt2mx
        >>> from pt2mx.pt2e.observe.qspec import mx_qscheme
        >>> from pt2mx.pt2e.observe.range_observers import MXHistogramObserver
        >>> observer = MXHistogramObserver(mx_qscheme(pt2mx.MXSpec("mxfp8")), bins=4)
        >>> _ = observer(torch.tensor([-1.5, 0.5, 0.6, 1.5]))
        >>> observer.limit, observer.histogram
        (2.0, tensor([1, 0, 2, 1]))
    """

    histogram: Tensor
    exponent: Tensor

    def __init__(self, qscheme: tuple, *, bins: int = 2048, **options: Any) -> None:
        super().__init__(qscheme, **options)
        if isinstance(bins, bool) or not isinstance(bins, int) or not 2 <= bins <= 2**24 or bins % 2:
            raise MXError(f"bins={bins!r} must be an even number from 2 to 2**24")
        self.bins = bins
        self.register_buffer("histogram", torch.zeros(bins, dtype=torch.int64))
        self.register_buffer("exponent", torch.full((1,), _NO_EXPONENT))

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Add a tensor to the statistics.

        Args:
            x: (..., n, ...) float32, float16 or bfloat16.
        """
        super().collect(x)
        if not x.numel():
            return
        x, half = x.detach().flatten(), self.bins // 2
        finite = x.isfinite()
        values = torch.where(finite, x.double(), 0.0)
        largest = values.abs().amax().reshape(1)
        # largest = m * 2**exponent with m in [1/2, 1)
        seen = torch.where(largest > 0, torch.frexp(largest)[1].to(torch.int64), _NO_EXPONENT)
        exponent = torch.maximum(self.exponent, seen)
        joined = (torch.arange(self.bins, device=x.device) - half >> (exponent - self.exponent).clamp(max=62)) + half
        per_limit = (1023 - exponent << 52).view(torch.float64)  # 2**-exponent, exactly
        bins = (values * per_limit * half).floor().to(torch.int64) + half
        counts = torch.zeros_like(self.histogram).index_add(0, joined, self.histogram)
        self.histogram.copy_(counts.index_add(0, bins, finite.to(torch.int64)))
        self.exponent.copy_(exponent)

    def reset_statistics(self) -> None:
        """Reset the statistics."""
        super().reset_statistics()
        self.histogram.zero_()
        self.exponent.fill_(_NO_EXPONENT)

    @property
    def limit(self) -> float:
        """The largest magnitude that the bins cover."""
        return 2.0 ** int(self.exponent)

    @property
    def value_range(self) -> ValueRange | None:
        seen = super().value_range
        return seen and ValueRange(seen.least, seen.largest, self.limit, tuple(self.histogram.tolist()))
