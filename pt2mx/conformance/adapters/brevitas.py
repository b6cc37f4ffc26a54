"""Brevitas: its MX quantizers of activations. They return values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from brevitas.nn import QuantIdentity
from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act, MXInt8Act
from torch import Tensor

from pt2mx.conformance.adapters.case import Case

_QUANTIZERS = {"fp8_e4m3": MXFloat8e4m3Act, "int8": MXInt8Act}


def cases() -> Iterator[Case]:
    """Yield the two formats."""
    for name, quantizer in _QUANTIZERS.items():
        yield Case(name, partial(_quantize, QuantIdentity(quantizer, group_dim=-1).eval()))


@torch.no_grad()
def _quantize(layer: QuantIdentity, x: Tensor) -> Tensor:
    return layer(x)
