"""The ranks that a language model is divided among: processes of `torchrun`, and their files."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from pt2mx.errors import MXError

_Item = TypeVar("_Item")

#: in the name of a program of one rank: how many there are
_RANKS = re.compile(r"\.rank\d+of(\d+)\.pt2")


def join(ranks: int) -> None:
    """Make this process, which `torchrun` started, one of the default process group, where it is none yet.

    Raises:
        MXError: where so many processes do not run.
    """
    launched = dist.is_torchelastic_launched()
    running = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]) if launched else 1
    if running != ranks:
        raise MXError(
            f"the number of ranks is {ranks} and that of processes {running}: start `torchrun --nproc-per-node {ranks} "
            "-m pt2mx ...`, or, for one rank, no torchrun"
        )
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        atexit.register(_leave)


def _leave() -> None:
    """End this process's part in the group. CUDA graphs that hold its collectives would keep NCCL waiting."""
    torch.compiler.reset()
    dist.destroy_process_group()


def places(ranks: int) -> list[AbstractContextManager[None]]:
    """The ranks that this process exports, each to be entered: under `torchrun` its own, otherwise one after the other.

    Raises:
        MXError: where `torchrun` runs another number.
    """
    if ranks == 1 and not dist.is_torchelastic_launched():
        return [nullcontext()]
    if dist.is_initialized() or dist.is_torchelastic_launched():
        join(ranks)
        return [nullcontext()]
    return [_acting_as(rank, ranks) for rank in range(ranks)]


@contextmanager
def _acting_as(rank: int, ranks: int) -> Iterator[None]:
    """Be one of several ranks without the others: enough for an export, not for values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def program_file(is_shard: bool) -> str:
    """The name of the file that holds a program, of this rank if the model is divided."""
    return f"program.rank{dist.get_rank()}of{dist.get_world_size()}.pt2" if is_shard else "program.pt2"


def programs_in(folder: str | os.PathLike[str]) -> list[str]:
    """The names of the programs in a folder: one, or one a rank."""
    return sorted(
        file.name for pattern in ("program.pt2", "program.rank*of*.pt2") for file in Path(folder).glob(pattern)
    )


def programs_of_others(folder: str | os.PathLike[str], is_shard: bool) -> list[str]:
    """The names of the programs in a folder that are for another number of ranks than runs."""
    own = _RANKS.findall(program_file(is_shard))
    return [name for name in programs_in(folder) if _RANKS.findall(name) != own]


def own_program_in(folder: str | os.PathLike[str]) -> str:
    """The name of the program that this process is to load. It joins the other ranks, if there are any.

    Raises:
        MXError: where there is none, and where other processes run than the folder is for.
    """
    names = programs_in(folder)
    if not names:
        raise MXError(f"{str(folder)!r} holds no program.pt2: give the folder that `pt2mx quantize` wrote")
    if divided := _RANKS.findall(names[0]):
        join(int(divided[0]))
    return program_file(bool(divided))


def is_first() -> bool:
    """True of the rank that speaks, and of a process without others."""
    return not dist.is_initialized() or dist.get_rank() == 0


def wait() -> None:
    """Until all ranks are here."""
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def first_speaks() -> Iterator[None]:
    """Leave what other ranks print out."""
    with ExitStack() as stack:
        if not is_first():
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


def of_first(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yield, on every rank, the items of the first one."""
    while True:
        held = [next(items, None) if is_first() else None]
        if dist.is_initialized():
            dist.broadcast_object_list(held)
        if held[0] is None:
            return
        yield held[0]
