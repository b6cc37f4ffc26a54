"""The processes of a group, for tests of joint computations of ranks."""

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from tests.fresh_process import run_program

# the ranks are forked from a process that has imported the test: each would import it again
_RUN = """
import pickle, sys
import torch.multiprocessing
work, arguments, count = pickle.loads(bytes.fromhex(sys.argv[1]))
torch.multiprocessing.start_processes(work, arguments, nprocs=count, start_method="fork")
"""


def run_ranks(work: Callable, *arguments: object, count: int = 2, method: str = "fork") -> None:
    """Call `work(rank, *arguments)` in one process per rank, and wait for all. Dynamo reads the state of CUDA, which
    fails in a forked process: work that compiles needs the method "spawn"."""
    if method == "spawn":
        torch.multiprocessing.start_processes(work, arguments, nprocs=count, start_method=method)
        return
    request = pickle.dumps((work, arguments, count)).hex()
    with tempfile.TemporaryDirectory() as folder:
        finished = run_program(_RUN, "ranks", Path(folder), arguments=[request])
    assert finished.status == 0, finished.err


def results_of_ranks(work: Callable, *arguments: object, method: str = "fork") -> list[Any]:
    """Call `work(rank, *arguments)` on two ranks of a group of gloo, the default one, and return their results."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_in_group, folder, work, arguments, method=method)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in (0, 1)]


def _in_group(rank: int, folder: str, work: Callable, arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    torch.save(work(rank, *arguments), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
