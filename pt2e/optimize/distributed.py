"""Calibration on several ranks of `torch.distributed`: each runs batches of its own, their sums are added up, and the
weights are shared out among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pt2mx.pt2e.optimize.observers import MXHessianObserver, MXIndexObserver
from pt2mx.pt2e.optimize.report import WeightReport
from pt2mx.pt2e.optimize.targets import Site

#: weights that a rank rounds before the ranks exchange theirs
_AT_ONCE = 8

Rounded = tuple[Tensor | None, WeightReport]


def least(count: int, group: dist.ProcessGroup | None) -> int:
    """The least of the counts of all ranks."""
    counts = [count]
    if group is not None:
        counts *= group.size()
        dist.all_gather_object(counts, count, group=group)
    return min(counts)


def add_up(
    observers: Iterable[MXHessianObserver],
    rows: Iterable[MXIndexObserver],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> None:
    """Give the observers of every rank the sums over all ranks. A rank may have seen no rows of some input."""
    if group is None:
        return
    for counter in rows:
        counter.counts = counter.counts.to(device)
        dist.all_reduce(counter.counts, group=group)
    for observer in observers:
        found: list[tuple[int, Tensor, list[torch.Size]]] = [(0, observer.counts, [])] * group.size()
        seen = observer.count, observer.counts, [part.shape for part in observer.parts]
        dist.all_gather_object(found, seen, group=group)
        shapes = max((shapes for *_, shapes in found), key=len)
        if not shapes:
            continue
        if observer.amax is None:
            observer.parts = [torch.zeros(shape, device=observer.home or device) for shape in shapes]
            observer.amax = torch.zeros(shapes[0][0], sum(shape[1] for shape in shapes), device=device)
        for part in observer.parts:
            moved = part.to(device)  # a rank's device speaks to those of the others; the host may not
            dist.all_reduce(moved, group=group)
            part.copy_(moved)
        dist.all_reduce(observer.amax, dist.ReduceOp.MAX, group=group)
        observer.count = sum(count for count, *_ in found)
        observer.counts = torch.stack([counts for _, counts, _ in found if len(counts)]).sum(0)


def share_out(
    sites: Sequence[Site], work: Callable[[Site], Rounded], group: dist.ProcessGroup | None
) -> Iterable[tuple[Site, Rounded]]:
    """Yield what `work` gives for each weight, in order. Of several ranks each does its share: rank r those with the
    numbers r, r + ranks, and so on, a few before these are yielded and their memory is free."""
    if group is None:
        yield from ((site, work(site)) for site in sites)
        return
    rank, ranks = group.rank(), group.size()
    for first in range(0, len(sites), _AT_ONCE * ranks):
        few = sites[first : first + _AT_ONCE * ranks]
        own = {i: work(site) for i, site in enumerate(few) if i % ranks == rank}
        for i, site in enumerate(few):
            value, *reports = own.pop(i, (None,))
            source = dist.get_global_rank(group, i % ranks)
            message: list[Any] = [value is not None, *reports] if reports else [None, None]
            dist.broadcast_object_list(message, source, group=group)
            changed, report = message
            if changed:
                if value is None:  # what is sent is memory: the strides of all ranks must be the same
                    value = torch.empty_like(site.value, memory_format=torch.contiguous_format)
                value = value.contiguous()
                dist.broadcast(value, source, group=group)
            yield site, (value, report)
