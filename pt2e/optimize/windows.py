"""The windows of a convolution's input ("im2col"): rows that meet its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pt2mx.pt2e.optimize.hessian_observer import ROWS, sample


def windows(x: Tensor, groups: int, taps: tuple[int, ...], arguments: dict[str, Any]) -> Tensor:
    """The windows of a convolution's input, (groups, rows, taps * channels), channels fastest; of many those that an
    observer takes, chosen before they are copied. `arguments`: stride, padding and dilation."""
    dims = len(taps)
    stride, dilation = (_each(arguments[name], dims) for name in ("stride", "dilation"))
    x = x if x.dim() == dims + 2 else x.unsqueeze(0)
    x = pad(x, _padding(arguments["padding"], taps, dilation))
    for i in range(dims):
        x = x.unfold(2 + i, dilation[i] * (taps[i] - 1) + 1, stride[i])[..., :: dilation[i]]
    x = x.unflatten(1, (groups, -1))  # (B, groups, channels, windows, ..., taps, ...)
    outside, inside = range(3, 3 + dims), range(3 + dims, 3 + 2 * dims)
    x = x.permute(1, 0, *outside, *inside, 2)
    counts = x.shape[1 : 2 + dims]
    if (total := counts.numel()) > ROWS:
        index: tuple[Any, ...] = (slice(None), *torch.unravel_index(sample(total, x.device), counts))
        return x[index].flatten(2)
    return x.flatten(2 + dims).flatten(1, 1 + dims)


def windows_of_transposed(x: Tensor, taps: tuple[int, ...], arguments: dict[str, Any]) -> Tensor:
    """The rows that meet the flipped taps of a transposed convolution, (1, rows, taps * channels): it is a convolution
    of its input with zeros between the values."""
    dims = len(taps)
    names = ("stride", "padding", "dilation", "output_padding")
    stride, padding, dilation, behind = (_each(arguments[name], dims) for name in names)
    x = x if x.dim() == dims + 2 else x.unsqueeze(0)
    spread = x.new_zeros(*x.shape[:2], *((n - 1) * s + 1 for n, s in zip(x.shape[2:], stride, strict=True)))
    every: tuple[Any, ...] = (..., *(slice(None, None, s) for s in stride))
    spread[every] = x
    sides = [d * (k - 1) - p for d, k, p in zip(dilation, taps, padding, strict=True)]
    pairs = [(side, side + more) for side, more in zip(sides, behind, strict=True)]
    spread = pad(spread, [side for pair in reversed(pairs) for side in pair])
    return windows(spread, 1, taps, {"stride": [1], "padding": [0], "dilation": dilation})


def _padding(padding: Any, taps: tuple[int, ...], dilation: list[int]) -> list[int]:
    """The arguments of `pad`, from the last dimension on."""
    if isinstance(padding, str):
        whole = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, taps, strict=True)]
        sides = [(total // 2, total - total // 2) for total in whole]
    else:
        sides = [(p, p) for p in _each(padding, len(taps))]
    return [side for pair in reversed(sides) for side in pair]


def _each(values: list[int], dims: int) -> list[int]:
    return list(values) * dims if len(values) == 1 else list(values)
