"""The processes of a group, for tests of what ranks compute together."""

import multiprocessing
from collections.abc import Callable

import torch.multiprocessing

# what takes long to import is imported once, by a process that makes the others as copies of itself
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.language_models", "pt2mx.pt2e.cli.command"])


def run_ranks(work: Callable, *arguments: object, count: int = 2, method: str = "forkserver") -> None:
    """Call `work(rank, *arguments)` in a process a rank, and wait for all of them. Dynamo asks CUDA, where there is
    one, for its state, which a forked process cannot: work that compiles takes the method "spawn"."""
    torch.multiprocessing.start_processes(work, arguments, nprocs=count, start_method=method)
