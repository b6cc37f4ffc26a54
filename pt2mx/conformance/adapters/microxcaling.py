"""microxcaling: `quantize_mx_op`, by its two roundings to nearest. It returns values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mx.mx_ops import quantize_mx_op
from mx.specs import finalize_mx_specs
from torch import Tensor

from pt2mx.conformance.adapters.case import Case
from pt2mx.formats import FORMATS

#: its name of a rounding -> pt2mx's
_ROUNDINGS = {"nearest": "half_away", "even": "even"}


def cases() -> Iterator[Case]:
    """Yield every format with each rounding."""
    for name in FORMATS:
        for round_, rounding in _ROUNDINGS.items():
            specs = finalize_mx_specs({"w_elem_format": name, "block_size": 32, "scale_bits": 8, "custom_cuda": False})
            yield Case(name, partial(_quantize, specs, name, round_), scale_mode="floor", rounding=rounding)


def _quantize(specs: dict, name: str, round_: str, x: Tensor) -> Tensor:
    return quantize_mx_op(x, specs, elem_format=name, axes=[-1], round=round_)
