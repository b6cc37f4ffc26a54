"""The processes of a group, for tests of what ranks compute together."""

from collections.abc import Callable

import torch.multiprocessing


def run_ranks(work: Callable, *arguments: object, count: int = 2, method: str = "forkserver") -> None:
    """Call `work(rank, *arguments)` in a process a rank, and wait for all of them. Dynamo asks CUDA, where there is
    one, for its state, which a forked process cannot: work that compiles takes the method "spawn"."""
    torch.multiprocessing.start_processes(work, arguments, nprocs=count, start_method=method)
