"""Random numbers of the kinds that kernels treat differently."""

import torch
from torch import Tensor

from pt2mx import ELEMENTS, SCALE_FORMATS
from pt2mx.kernels.packing import unpacked_length


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


def every_code_and_scale(name: str, scale_format: str) -> tuple[Tensor, Tensor, int]:
    """Return (scales, bytes), every byte as codes of an element in each row; (scales, 1), patterns of floats of every
    kind, subnormal, negative, Inf and NaN, or every byte; and the number of codes in a row."""
    dtype, bits = SCALE_FORMATS[scale_format].dtype, ELEMENTS[name].bits
    patterns = torch.cat([torch.arange(256) * 257, torch.tensor([1, 0x7C00, 0x7F80, 0x7FC0, 0x3C01])])
    scale = torch.arange(256, dtype=torch.uint8)
    if dtype == torch.float32:
        scale = (patterns.int() << 16 | 1).view(torch.float32)
    elif dtype.is_floating_point:
        scale = patterns.to(torch.int16).view(dtype)
    data = torch.arange(256, dtype=torch.uint8)[: 255 if bits == 6 else 256].repeat(len(scale), 1)
    return data, scale[:, None], unpacked_length(data.shape[1], bits)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """(65536, 1): of 16 bits."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).unsqueeze(1)
