"""The time of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.pt2e.debug.batches import arguments_of, copied

#: of what is timed: the least number of runs, and the seconds that they take together
_RUNS, _SECONDS = 5, 1.0


def compiled_milliseconds(model: GraphModule, batch: Any) -> float:
    """Compile a graph, and give the median time of a batch."""
    torch.compiler.reset()
    compiled = torch.compile(model)
    arguments = arguments_of(model, batch)

    def call() -> Any:
        args, kwargs = copied(arguments)
        return compiled(*args, **kwargs)

    devices = {leaf.device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)}
    try:
        with torch.no_grad():
            for _ in range(2):  # the first compiles
                call()
            times: list[float] = []
            while len(times) < _RUNS or sum(times) < _SECONDS:
                times.append(_seconds(call, devices))
            return 1e3 * median(times)
    finally:
        torch.compiler.reset()


def _seconds(run: Callable[[], Any], devices: set[torch.device]) -> float:
    _wait(devices)
    begin = time.perf_counter()
    run()
    _wait(devices)
    return time.perf_counter() - begin


def _wait(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
