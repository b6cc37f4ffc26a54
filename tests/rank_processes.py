"""The processes of a group, for tests of joint computations of ranks."""

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path

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
