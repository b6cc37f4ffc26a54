"""AMD Quark: `fake_quantize_mx` of its emulation of hardware, by its three scale rules. It returns values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx
from torch import Tensor

from pt2mx.conformance.adapters.case import Case
from pt2mx.formats import FORMATS


def cases() -> Iterator[Case]:
    """Yield every format by each rule."""
    for name in FORMATS:
        for mode in ("floor", "ceil", "even"):
            yield Case(name, partial(_quantize, "fp4" if name == "fp4_e2m1" else name, mode), scale_mode=mode)


def _quantize(element: str, mode: str, x: Tensor) -> Tensor:
    return fake_quantize_mx(x, 1, 32, mode, mx_element_dtype=element)
