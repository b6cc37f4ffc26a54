"""Memory whose end a kernel must not read past."""

import ctypes
import mmap
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

READ_WRITE, NO_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE, 0


@pytest.fixture
def before_guard_page() -> Iterator[Callable[[Tensor], Tensor]]:
    """A function that copies a tensor so that it ends where the memory of the process does."""
    protect = ctypes.CDLL(None).mprotect
    guards = []

    def copied(tensor: Tensor) -> Tensor:
        size = tensor.nbytes
        pages = -(-size // mmap.PAGESIZE)
        memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
        end = pages * mmap.PAGESIZE
        guard = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + end)
        assert protect(guard, mmap.PAGESIZE, NO_ACCESS) == 0
        guards.append(guard)
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=end - size)
        return flat.copy_(tensor.reshape(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)

    yield copied
    for guard in guards:
        protect(guard, mmap.PAGESIZE, READ_WRITE)
