"""AutoRound: its data types `mx_fp` and `mx_fp_rceil`. They return values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from auto_round.data_type import mxfp
from torch import Tensor

from pt2mx.conformance.adapters.case import Case

_FORMATS = {
    "fp8_e4m3": "mx_fp8e4m3",
    "fp8_e5m2": "mx_fp8e5m2",
    "fp6_e3m2": "mx_fp6e3m2",
    "fp6_e2m3": "mx_fp6e2m3",
    "fp4_e2m1": "mx_fp4e2m1",
    "int8": "mx_int8",
}


def cases() -> Iterator[Case]:
    """Yield each format by each rule; `mx_fp_rceil_v2` is for FP4."""
    for name, data_type in _FORMATS.items():
        yield Case(name, partial(_quantize, mxfp.quant_mx, data_type), scale_mode="floor")
        yield Case(name, partial(_quantize, mxfp.quant_mx_rceil, data_type), scale_mode="rceil")
    yield Case("fp4_e2m1", partial(_quantize, mxfp.quant_mx_rceil_v2, "mx_fp4e2m1"), scale_mode="rceil_v2")


def _quantize(function: Callable[..., tuple], data_type: str, x: Tensor) -> Tensor:
    bits = 8 if "8" in data_type else 6 if "6" in data_type else 4
    return function(x, bits=bits, group_size=32, data_type=data_type)[0].reshape(x.shape)
