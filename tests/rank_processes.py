"""The processes of a group, for tests of joint computations of ranks."""

import multiprocessing
from collections.abc import Callable

import torch.multiprocessing

from tests.fresh_process import IMPORTED

# the process that ranks are forked from imports this once, each rank would take seconds
multiprocessing.set_forkserver_preload([*IMPORTED, "pytest", "pt2mx.pt2e.language.quantize", "tests.language_models"])


def run_ranks(work: Callable, *arguments: object, count: int = 2, method: str = "forkserver") -> None:
    """Call `work(rank, *arguments)` in one process per rank, and wait for all. Dynamo reads the state of CUDA, which
    fails in a forked process: work that compiles needs the method "spawn"."""
    torch.multiprocessing.start_processes(work, arguments, nprocs=count, start_method=method)
