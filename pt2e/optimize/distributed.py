"""Calibration on several ranks of `torch.distributed`, and rounding on several ranks or threads.

Each rank runs its own batches; their sums are added up, and the ranks share the rounding of the weights. Without
ranks, the threads of one process share the rounding of small weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pt2mx.algorithms.block_scales import BlockScales
from pt2mx.pt2e.optimize.observers import MXHessianObserver, MXIndexObserver
from pt2mx.pt2e.optimize.report import WeightReport
from pt2mx.pt2e.optimize.targets import WeightTarget

#: weights that a rank rounds between two exchanges of results, or that a thread rounds before results are yielded
_AT_ONCE = 8
#: values of a small weight: operators on one are too short for several threads, and several weights fit into memory
_SMALL = 1 << 20

#: a rounded weight, None if it does not change; its scales, None if they follow from its values; its report
Rounded = tuple[Tensor | None, BlockScales | None, WeightReport]


def min_over_ranks(count: int, group: dist.ProcessGroup | None) -> int:
    """Return the minimum of a count over all ranks."""
    counts = [count]
    if group is not None:
        counts *= group.size()
        dist.all_gather_object(counts, count, group=group)
    return min(counts)


def all_reduce_sums(
    observers: Iterable[MXHessianObserver],
    rows: Iterable[MXIndexObserver],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> None:
    """Add up the observers' sums over all ranks, in place. A rank may have seen no rows of an input."""
    if group is None:
        return
    for counter in rows:
        counter.counts = counter.counts.to(device)
        dist.all_reduce(counter.counts, group=group)
    for observer in observers:
        state = observer.count, observer.counts, [part.shape for part in observer.parts]
        states = [state] * group.size()
        dist.all_gather_object(states, state, group=group)
        shapes = max((shapes for *_, shapes in states), key=len)
        if not shapes:
            continue
        if observer.amax is None:
            observer.parts = [torch.zeros(shape, device=observer.home or device) for shape in shapes]
            observer.amax = torch.zeros(shapes[0][0], sum(shape[1] for shape in shapes), device=device)
        for part in observer.parts:
            on_device = part.to(device)  # the backend may reduce on devices only
            dist.all_reduce(on_device, group=group)
            part.copy_(on_device)
        dist.all_reduce(observer.amax, dist.ReduceOp.MAX, group=group)
        observer.count = sum(count for count, *_ in states)
        observer.counts = torch.stack([counts for _, counts, _ in states if len(counts)]).sum(0)


def share_work(
    targets: Sequence[WeightTarget], work: Callable[[WeightTarget], Rounded], group: dist.ProcessGroup | None
) -> Iterable[tuple[WeightTarget, Rounded]]:
    """Yield what `work` returns for each weight, in order.

    With several ranks, rank r handles the weights r, r + ranks, and so on. The ranks exchange a few results at a time,
    which bounds the memory for results that are not yielded yet.
    """
    if group is None:
        for small, run in groupby(targets, _is_small):
            some = list(run)
            yield from _in_threads(some, work) if small else zip(some, map(work, some), strict=True)
        return
    rank, ranks = group.rank(), group.size()
    for first in range(0, len(targets), _AT_ONCE * ranks):
        chunk = targets[first : first + _AT_ONCE * ranks]
        results = {i: work(target) for i, target in enumerate(chunk) if i % ranks == rank}
        for i, target in enumerate(chunk):
            value, *others = results.pop(i, (None,))
            source = dist.get_global_rank(group, i % ranks)
            message: list[Any] = [value is not None, *others] if others else [None, None, None]
            dist.broadcast_object_list(message, source, group=group)
            changed, scales, report = message
            if changed:
                if value is None:  # broadcast sends memory, so the strides of all ranks must be equal
                    value = torch.empty_like(target.value, memory_format=torch.contiguous_format)
                value = value.contiguous()
                dist.broadcast(value, source, group=group)
            yield target, (value, None if scales is None else scales.to(target.value.device), report)


def _is_small(target: WeightTarget) -> bool:
    # threads do not inherit the inference mode, and cannot change its tensors
    return target.value.is_cpu and target.value.numel() <= _SMALL and not torch.is_inference_mode_enabled()


def _in_threads(
    targets: list[WeightTarget], work: Callable[[WeightTarget], Rounded]
) -> Iterable[tuple[WeightTarget, Rounded]]:
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for first in range(0, len(targets), _AT_ONCE * threads):
                chunk = targets[first : first + _AT_ONCE * threads]
                yield from zip(chunk, pool.map(work, chunk), strict=True)
    finally:
        torch.set_num_threads(threads)  # MKL has one number for all threads
