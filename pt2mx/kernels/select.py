"""Which kernel serves an eager call.

Every kernel module has the functions of `pt2mx.kernels.sliced`, takes inputs of any strides and at least one
dimension, and gives contiguous outputs; all agree to the bit.
"""

from types import ModuleType

from torch import Tensor

from pt2mx.kernels import sliced


def kernels_for(x: Tensor) -> ModuleType:
    """The fastest kernels that can work on x."""
    return sliced
