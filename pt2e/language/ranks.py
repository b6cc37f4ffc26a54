"""The ranks of a sharded language model: processes of `torchrun`, and their files."""

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

#: the file name of the encoder's program, which no rank shares out
ENCODER = "encoder.pt2"
#: the number of ranks in the file name of a rank's program
_RANKS = re.compile(r"\.rank\d+of(\d+)\.pt2")


def join(ranks: int) -> None:
    """Join the default process group in a process that `torchrun` started, unless it has joined already.

    Raises:
        MXError: where the number of processes is not `ranks`.
    """
    running = 1
    if dist.is_initialized():
        running = dist.get_world_size()
    elif dist.is_torchelastic_launched():
        running = int(os.environ["WORLD_SIZE"])
    if running != ranks:
        raise MXError(
            f"the number of ranks is {ranks} and the number of processes {running}: start "
            f"`torchrun --nproc-per-node {ranks} -m pt2mx ...`, or, for one rank, no torchrun"
        )
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
        atexit.register(_leave)


def join_all() -> dist.ProcessGroup | None:
    """Join all processes that `torchrun` started, and return their group; None without `torchrun`."""
    if not dist.is_torchelastic_launched():
        return None
    join(int(os.environ["WORLD_SIZE"]))
    return dist.group.WORLD


def _leave() -> None:
    """Leave the process group. First drop the CUDA graphs: NCCL would wait for their collectives."""
    torch.compiler.reset()
    dist.destroy_process_group()


def rank_contexts(ranks: int) -> list[AbstractContextManager[None]]:
    """Return a context for each rank that this process exports: under `torchrun` its own, otherwise all in turn.

    Raises:
        MXError: where `torchrun` runs another number of processes.
    """
    if ranks == 1 and not dist.is_torchelastic_launched():
        return [nullcontext()]
    if dist.is_initialized() or dist.is_torchelastic_launched():
        join(ranks)
        return [nullcontext()]
    return [_acting_as(rank, ranks) for rank in range(ranks)]


@contextmanager
def _acting_as(rank: int, ranks: int) -> Iterator[None]:
    """Act as one of several ranks without the others, which suffices for an export but not for values."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def program_file(is_shard: bool) -> str:
    """Return the file name of a program: of this rank where the model is sharded."""
    return f"program.rank{dist.get_rank()}of{dist.get_world_size()}.pt2" if is_shard else "program.pt2"


def programs_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the file names of the programs in a folder: one, or one per rank."""
    return sorted(
        file.name for pattern in ("program.pt2", "program.rank*of*.pt2") for file in Path(folder).glob(pattern)
    )


def programs_of_others(folder: str | os.PathLike[str], is_shard: bool) -> list[str]:
    """Return the file names of the programs in a folder for another number of ranks than is running."""
    running = _RANKS.findall(program_file(is_shard))
    return [name for name in programs_in(folder) if _RANKS.findall(name) != running]


def of_checkpoint(folder: str | os.PathLike[str]) -> str:
    """Return how to make a program of a folder with a checkpoint, as the end of an error; empty for other folders."""
    if not any(Path(folder).glob("*.safetensors")):
        return ""
    return f"; `pt2mx quantize --model hf:{folder}` makes one of a checkpoint"


def own_program_in(folder: str | os.PathLike[str]) -> str:
    """Return the file name of the program for this process, after joining the other ranks of a sharded model.

    Raises:
        MXError: where there is no folder or no program, or the folder is for another number of ranks.
    """
    names = programs_in(folder)
    if not names:
        fault = f"{str(folder)!r} holds no program.pt2" if Path(folder).is_dir() else f"no folder {str(folder)!r}"
        raise MXError(f"{fault}: give the folder that `pt2mx quantize` wrote{of_checkpoint(folder)}")
    if sharded := _RANKS.findall(names[0]):
        join(int(sharded[0]))
    return program_file(bool(sharded))


def is_first() -> bool:
    """Return True in the first rank, which prints, and in a process without other ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def wait() -> None:
    """Wait until all ranks call this."""
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def only_first_prints() -> Iterator[None]:
    """Discard what ranks other than the first print in the block."""
    with ExitStack() as stack:
        if not is_first():
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield


def of_first(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yield the items of the first rank on every rank."""
    while True:
        item = [next(items, None) if is_first() else None]
        if dist.is_initialized():
            dist.broadcast_object_list(item)
        if item[0] is None:
            return
        yield item[0]
