"""`random_bits`, the numbers of stochastic rounding, and their seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.kernels import reference
from pt2mx.kernels.select import run_kernel
from pt2mx.modes import ROUNDINGS
from pt2mx.ops.checks import check_seed
from pt2mx.ops.operator import COMPLIANT, As, Operator, T, operator
from pt2mx.spec import MXSpec


def seed_of(x: Tensor, spec: MXSpec, seed: int | None) -> Tensor | None:
    """Return the seed with which x is rounded, () int64 on its device; None for a rounding that draws no numbers.

    Without a seed it is the next number of torch's default generator. It is made on the device: nothing is copied or
    waited for, and a CUDA graph draws anew at each replay.
    """
    if not ROUNDINGS[spec.rounding].random:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=x.device)
    check_seed(seed)
    return torch.full((), seed, dtype=torch.int64, device=x.device)


@operator("random_bits", 1, "`size` int32, in [0, 2**31)", COMPLIANT)
class RandomBits(Operator[T]):
    """The numbers of stochastic rounding, by Philox-4x32-10: the i-th in row-major order is the upper 31 bits of word
    i % 4 of the block whose counter is i // 4 and whose key is the seed.

    Example:
        >>> torch.ops.pt2mx.random_bits(torch.tensor(0), [2])
        tensor([ 856945770, 1890902726], dtype=torch.int32)
    """

    seed: Annotated[T, "() int64"]
    size: Annotated[Sequence[int], As(type="SymInt[]"), "the shape of the values that are rounded"]

    def kernel(self) -> Tensor:
        if self.seed.dtype != torch.int64 or self.seed.dim():
            raise MXError(
                f"the seed tensor must be of shape () and int64, not {tuple(self.seed.shape)} and {self.seed.dtype}"
            )
        return run_kernel(self)

    def define(self) -> Tensor:
        return reference.random_bits(self.seed, torch.Size(self.size))

    def fake(self) -> Tensor:
        return self.seed.new_empty(self.size, dtype=torch.int32)


random_bits = RandomBits.overload
