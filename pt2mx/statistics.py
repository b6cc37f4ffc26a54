"""What quantizing a tensor does to it: tensors in, sums out, so that batches add up."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.functional import fake_quantize_mx
from pt2mx.kernels.reference import NAN_SCALE, scales
from pt2mx.kernels.sliced import split
from pt2mx.spec import MXSpec


def quantization_sums(x: Tensor, spec: MXSpec) -> dict[str, Tensor]:
    """Sums over one tensor; over several tensors they add up.

    Args:
        x: (..., n, ...) float32, float16 or bfloat16.

    Returns:
        0-d tensors `values` (count), `signal` (sum of x**2), `noise` (sum of (x - quantized x)**2), `saturated` (count
        of |x| above the largest value of its block), `flushed` (count of x != 0 that became 0), and `exponents`:
        (256,) blocks of each scale byte. Counts are int64, powers float64.

    Raises:
        MXError: for a scale of more than 8 exponent bits.
    """
    if spec.scale_exp_bits > 8:
        raise MXError(f"{spec}: statistics count scales by their E8M0 byte; scale_exp_bits must be at most 8")
    x = torch.atleast_1d(x)
    spec = spec.replace(axis=spec.axis % x.dim())
    _, slices = split(spec.axis, x)
    parts = [_sums(part, spec) for (part,) in slices]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _sums(x: Tensor, spec: MXSpec) -> dict[str, Tensor]:
    y, scale = fake_quantize_mx(x, spec), scales(x, spec)
    # in float64, where 2**-127 is no subnormal and max * 2**127 no Inf
    powers = torch.tensor([2.0 ** (byte - 127) for byte in range(256)], dtype=torch.float64)
    block = min(spec.block_size, x.shape[spec.axis])
    power = powers.to(x.device)[scale.to(torch.int64)].repeat_interleave(block, spec.axis)
    power = power.narrow(spec.axis, 0, x.shape[spec.axis])
    wide = x.double()
    saturated = (wide > spec.element.max_normal * power) | (wide < spec.element.lowest * power)
    return {
        "values": torch.tensor(x.numel(), device=x.device),
        "signal": wide.square().sum(),
        "noise": (wide - y.double()).square().sum(),
        "saturated": saturated.sum(),
        "flushed": ((x != 0) & (y == 0)).sum(),
        "exponents": torch.bincount(scale.flatten().to(torch.int64), minlength=256),
    }


def sqnr_db(signal: float, noise: float) -> float:
    """Signal to quantization noise ratio in dB of two powers; inf where nothing was lost."""
    if noise == 0:
        return math.inf
    if noise == math.inf:  # a scale mode that dequantizes to Inf in the top binade
        return -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else (-math.inf if signal == 0 else math.nan)


@dataclass(frozen=True)
class QuantizationStatistics:
    """What was observed of a tensor under a spec.

    `sqnr` in dB; `saturated` and `flushed` are shares of the values; `exponents` counts the blocks by their unbiased
    shared exponent; `nan_blocks` counts the blocks that held an Inf or a NaN.
    """

    values: int
    sqnr: float
    saturated: float
    flushed: float
    exponents: dict[int, int]
    nan_blocks: int

    @classmethod
    def from_sums(cls, sums: dict[str, Tensor]) -> "QuantizationStatistics | None":
        """The statistics of (added) `quantization_sums`, or None where no value was seen."""
        values = int(sums["values"])
        if values == 0:
            return None
        blocks = sums["exponents"].tolist()
        return cls(
            values=values,
            sqnr=sqnr_db(float(sums["signal"]), float(sums["noise"])),
            saturated=int(sums["saturated"]) / values,
            flushed=int(sums["flushed"]) / values,
            exponents={byte - 127: count for byte, count in enumerate(blocks[:NAN_SCALE]) if count},
            nan_blocks=blocks[NAN_SCALE],
        )
