"""The processes of a group, for tests of joint computations of ranks."""

from collections.abc import Callable

import torch.multiprocessing


def run_ranks(work: Callable, *arguments: object, count: int = 2, method: str = "forkserver") -> None:
    """Call `work(rank, *arguments)` in one process per rank, and wait for all. Dynamo reads the state of CUDA, which
    fails in a forked process: work that compiles needs the method "spawn"."""
    torch.multiprocessing.start_processes(work, arguments, nprocs=count, start_method=method)
