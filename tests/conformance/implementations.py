"""Implementations with one planted fault each, and the corner and section that must name it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pt2mx import dequantize_mx, fake_quantize_mx, quantize_mx


class Planted(NamedTuple):
    """Arguments of `check`, the corners that must deviate, the first one first: name -> section; and what the first
    example must hold."""

    arguments: dict[str, object]
    corners: dict[str, str]
    example: str


def _fp4(change: Callable[[Tensor, Tensor, Tensor], Tensor], **modes: str) -> Callable[[Tensor], Tensor]:
    """Return a quantizer to FP4 whose values are changed: (x / scale, values / scale, scale) -> values / scale."""

    def quantize(x: Tensor) -> Tensor:
        scale_bytes, _ = quantize_mx(x, "mxfp4", **modes)
        scale = torch.exp2(scale_bytes.double() - 127).repeat_interleave(32, -1)[:, : x.shape[1]]
        values = fake_quantize_mx(x, "mxfp4", **modes)
        return (change(x / scale, values / scale, scale) * scale).float()

    return quantize


def _packed(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], format: str = "mxfp4"):
    """Return a quantizer whose (scale, codes) are changed."""
    return lambda x: change(*quantize_mx(x, format))


def _swap_last(scale: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
    data[:, -1] = data[:, -1] << 4 | data[:, -1] >> 4
    return scale, data


def _rounded_log2(x: Tensor) -> Tensor:
    """Floor of a logarithm that float32 rounded: one ulp below a power of two it is one too large."""
    amax = x.abs().amax(-1, keepdim=True)
    above = torch.log2(amax).floor() > torch.frexp(amax)[1] - 1
    wrong = fake_quantize_mx(torch.cat([2 * amax, x], -1), "mxfp4{64}")[:, 1:]
    return torch.where(above, wrong, fake_quantize_mx(x, "mxfp4"))


def _decode(data: Tensor, scale: Tensor) -> Tensor:
    return dequantize_mx(data, scale, "mxfp4")


def _by_value(x: Tensor) -> Tensor:
    finite = torch.where(x.isfinite(), x, 0.0)
    return torch.where(x.isfinite(), fake_quantize_mx(finite, "mxfp4"), x)


FP4 = {"format": "mxfp4"}
PLANTED = {
    "one wrong tie": Planted(
        {"quantize": _fp4(lambda x, v, s: torch.where(x.abs() == 2.5, 3 * x.sign(), v)), **FP4, "rounding": "even"},
        {"ties": "5.3.3"},
        "[4.0, 2.5]: 2.5 became 3.0, expected 2.0",
    ),
    "other ties than claimed": Planted(
        {"quantize": lambda x: fake_quantize_mx(x, "mxfp4", rounding="half_away"), **FP4, "rounding": "even"},
        {"ties": "5.3.3"},
        "[4.0, 0.25]: 0.25 became 0.5, expected 0.0; it follows rounding half_away",
    ),
    "subnormals flushed": Planted(
        {"quantize": _fp4(lambda x, v, s: torch.where(v.abs() < 1, 0, v)), **FP4, "scale_mode": "floor"},
        {"subnormals": "5.3.3"},
        "[4.0, 0.25000003]: 0.25000003 became 0.0, expected 0.5",
    ),
    "float32 subnormals flushed": Planted(
        {"quantize": lambda x: fake_quantize_mx(torch.where(x.abs() < 2.0**-126, 0, x), "mxfp4"), **FP4},
        {"small blocks": "5.4.1"},
        "[2.3509887e-38, 5.877472e-39]: 5.877472e-39 became 0.0, expected 5.877472e-39",
    ),
    "floor instead of even": Planted(
        {"quantize": lambda x: quantize_mx(x, "mxfp6"), "format": "mxfp6", "scale_mode": "even"},
        {"scale rule": "6.3"},
        "it follows scale rule floor",
    ),
    "no clamp": Planted(
        {"quantize": _fp4(lambda x, v, s: torch.where(x.abs() >= 7, 8 * x.sign(), v)), **FP4},
        {"saturation": "6.3"},
        "[7.0, 3.0, 1.5, 0.75]: 7.0 became 8.0, expected 6.0",
    ),
    "rounded log2": Planted(
        {"quantize": _rounded_log2, **FP4, "scale_mode": "floor"},
        {"powers of two": "6.3"},
        "",
    ),
    "one swapped byte": Planted({"quantize": _packed(_swap_last), **FP4}, {"packing": "5.1"}, "value 30 of a block"),
    "swapped nibbles": Planted(
        {"quantize": _packed(lambda s, d: (s, d << 4 | d >> 4)), **FP4, "packing": "low_first"},
        {"packing": "5.1"},
        "claims codes packed low_first, follows codes packed high_first",
    ),
    "NaN by value": Planted(
        {"quantize": _by_value, **FP4},
        {"Inf and NaN": "5.3.3"},
        "NaN becomes NaN in a block of numbers, and fp4_e2m1 has no such code",
    ),
    "ignored NaN scale": Planted(
        {"quantize": None, "dequantize": lambda d, s: _decode(d, s.clamp(max=254)), **FP4},
        {"scale byte 255": "5.1"},
        "code 0x00 under scale byte 255 became 0.0, expected nan",
    ),
    "least scale flushed": Planted(
        {"quantize": None, "dequantize": lambda d, s: torch.where(s.repeat_interleave(32, 1) > 0, _decode(d, s), 0)}
        | FP4,
        {"scale bytes 0 to 254": "5.4.1"},
        "code 0x01 under scale byte 0 became 0.0, expected 2.938736e-39",
    ),
    "a wrong code": Planted(
        {"quantize": None, "dequantize": lambda d, s: _decode(torch.where(d == 0xDC, 0xDD, d).byte(), s), **FP4},
        {"every code": "5.3.3", "scale bytes 0 to 254": "5.4.1"},
        "",
    ),
    "code -128": Planted(
        {"quantize": lambda x: fake_quantize_mx(x, "int8_full"), "format": "mxint8", "full_range": False},
        {"saturation": "6.3"},
        "[-1.9921875]: -1.9921875 became -2.0, expected -1.984375; it follows code -128 in use",
    ),
    "zeros become NaN": Planted(
        {"quantize": lambda x: fake_quantize_mx(x, "mxfp4") / (x != 0).any(-1, keepdim=True), **FP4},
        {"zero blocks": "6.3"},
        "zeros became nan",
    ),
    "short last blocks": Planted(
        {"quantize": lambda x: fake_quantize_mx(x, f"mxfp4{{{32 + 16 * (x.shape[1] % 32 == 1)}}}"), **FP4},
        {"other lengths": "5.2"},
        "33 values: ",
    ),
}
