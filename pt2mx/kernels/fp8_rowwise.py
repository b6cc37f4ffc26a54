"""FP8 rows: quantized values as E4M3 codes with one scale a row, exactly (row-wise scaling of `torch._scaled_mm`).

E4M3 has a wider range than an element of 4 or 6 bits, so the ratio of a block's scale to the largest scale of its row
can go into the codes. FP8 tensor cores then multiply whole rows, and the row scales multiply the sums. A row does not
fit if its scales differ too much or it holds a NaN. Then its codes are zeros, its scale is -1, and its quantized values
are kept (`rest` in the operators, `unfit` here) for a separate matmul.

The functions here define the operators of `pt2mx.ops.fp8_rowwise`, for every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2mx.formats import ELEMENTS, ElementFormat
from pt2mx.kernels.constants import BLOCK
from pt2mx.kernels.elements import BIAS, NAN_SCALE, pow2
from pt2mx.spec import MXSpec

#: the dtype of the codes
E4M3 = torch.float8_e4m3fn
#: the scale of a row that does not fit
UNFIT = -1.0


class Room(NamedTuple):
    """The fit of an element into E4M3: the codes are values in units of the row's largest scale times `2**shift`, and a
    block fits if its scale is at least `2**-spread` of the largest."""

    shift: int
    spread: int

    @classmethod
    def of(cls, element: ElementFormat) -> Room:
        e4m3 = ELEMENTS["fp8_e4m3"]
        shift = math.floor(math.log2(e4m3.max_normal / element.max_normal))
        quantum, quantum_e4m3 = (e.emin - e.mantissa_bits for e in (element, e4m3))
        return cls(shift, shift + quantum - quantum_e4m3)


#: element -> how it fits
ROOMS = {name: Room.of(ELEMENTS[name]) for name in ("fp4_e2m1", "fp6_e2m3", "fp6_e3m2")}

#: activations that are applied to x before quantization
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


def quantize(x: Tensor, spec: MXSpec, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """x: (..., K), K a multiple of 32 -> codes (..., K) uint8, scale (..., 1) float32, unfit (..., K) in x's dtype,
    which is undefined in the rows that fit."""
    x = ACTIVATIONS[activation](x).contiguous()
    of_x = spec.element.name, spec.block_size, spec.axis, spec.scale_mode, spec.rounding
    scale, data = torch.ops.pt2mx.quantize_mx(x, *of_x)
    holds = (x.unflatten(-1, (-1, BLOCK)) != 0).any(-1)
    codes, row_scale = of_packed(data, scale, spec.element, x.shape[-1], holds)
    return codes, row_scale, _values(data, scale, spec.element, x.dtype, x.shape[-1])


def of_packed(
    data: Tensor, scale: Tensor, element: ElementFormat, length: int, holds: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """data: (..., bytes of length) uint8, scale: (..., length / 32) uint8 -> codes (..., length), scale (..., 1).
    `holds`: the blocks whose scales count, by default those with a nonzero value."""
    room = ROOMS[element.name]
    units = _values(data, torch.full_like(scale, BIAS), element, torch.float32, length)
    units = units.unflatten(-1, (length // BLOCK, BLOCK))
    exponent, holds = scale.to(torch.int32), (units != 0).any(-1) if holds is None else holds
    top = torch.where(holds, exponent, 0).amax(-1, keepdim=True).clamp(min=room.shift + 1)
    below = exponent - top
    fits = ((exponent != NAN_SCALE) & ((below >= -room.spread) | ~holds)).all(-1, keepdim=True)
    factor = pow2((below + room.shift).clamp(-BIAS + 1, BIAS))
    codes = torch.where(fits.unsqueeze(-1), units * factor.unsqueeze(-1), 0.0).flatten(-2)
    row_scale = torch.where(fits, pow2(top - room.shift - BIAS), UNFIT)
    return codes.to(E4M3).view(torch.uint8), row_scale


def _values(data: Tensor, scale: Tensor, element: ElementFormat, dtype: torch.dtype, length: int) -> Tensor:
    return torch.ops.pt2mx.dequantize_mx(data, scale, element.name, BLOCK, dtype, -1, length)


def mm(
    codes: Tensor, scale: Tensor, unfit: Tensor, weight_codes: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """codes: (..., K), scale: (..., 1), unfit: (..., K), weight_codes: (N, K), weight_scale: (N, 1) of rows that fit,
    bias: (N,) or None -> (..., N) in the dtype of unfit."""
    weight = weight_codes.view(E4M3).to(torch.float32) * weight_scale
    x = torch.where(scale < 0, unfit.to(torch.float32), codes.view(E4M3).to(torch.float32) * scale)
    return F.linear(x, weight, None if bias is None else bias.to(torch.float32)).to(unfit.dtype)
