"""Random numbers of the kinds that kernels treat differently."""

import torch
from torch import Tensor


def random_values(shape: tuple[int, ...], dtype: torch.dtype, kind: int) -> Tensor:
    """Return values of one kind: near each other, any bit pattern, any binade, fp32 subnormals, ties."""
    if kind == 0:
        x = torch.randn(shape)
    elif kind == 1:
        x = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32).view(torch.float32)
    elif kind == 2:
        x = torch.randn(shape) * 2.0 ** torch.randint(-149, 128, shape)
    elif kind == 3:
        x = torch.randint(-(2**23), 2**23, shape) * 2.0**-149
    else:
        x = torch.randint(-64, 65, shape) * 2.0 ** int(torch.randint(-140, 115, ()))
    return x.to(dtype)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers of several binades, zeros, subnormals, and a block that is not finite if there is room."""
    x = torch.randn(shape) * torch.randint(-3, 4, shape).exp2()
    special = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-140), 2.0**-126, 6.0, -0.25, 1.75])
    some = torch.randperm(x.numel())[: len(special)]
    x.view(-1)[some] = special[: len(some)]
    if x.numel() > 1000:
        x.view(-1)[torch.randint(x.numel(), (3,))] = torch.tensor([float("inf"), -float("inf"), float("nan")])
        x.view(-1)[:70] *= 2.0**-120
    return x.to(dtype)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """(65536, 1): of 16 bits."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).unsqueeze(1)
