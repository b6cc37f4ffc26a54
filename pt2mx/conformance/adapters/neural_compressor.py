"""Intel Neural Compressor: `quantize_mx_op` of its algorithm `mx_quant`. It returns values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from neural_compressor.torch.algorithms.mx_quant.utils import quantize_mx_op
from torch import Tensor

from pt2mx.conformance.adapters.case import Case
from pt2mx.formats import FORMATS


def cases() -> Iterator[Case]:
    """Yield every format, ties to even."""
    for name in FORMATS:
        yield Case(name, partial(_quantize, name), scale_mode="floor", rounding="even")


def _quantize(name: str, x: Tensor) -> Tensor:
    return quantize_mx_op(x, name, "even", 32, axes=[-1])
