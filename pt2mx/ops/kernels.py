"""The kernels that serve an eager call, as `pt2mx.kernels.select` chooses them.

It is imported with the first call, for it brings Inductor, whose C++ compiler builds the kernels of the CPU.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from pt2mx.formats import ElementFormat


def kernels_for(x: Tensor, element: ElementFormat | None = None) -> ModuleType:
    from pt2mx.kernels import select

    return select.kernels_for(x, element)


def linear_kernels_for(x: Tensor, element: ElementFormat | None = None) -> ModuleType:
    from pt2mx.kernels import select

    return select.linear_kernels_for(x, element)


def runs_triton(device: torch.device) -> bool:
    from pt2mx.kernels import select

    return select.runs_triton(device)
