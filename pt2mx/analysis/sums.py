"""Sums of the quantization errors of a tensor. Sums over batches add up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.functional import fake_quantize_mx, tensor_scale_mx
from pt2mx.kernels.elements import NAN_SCALE
from pt2mx.kernels.float_scales import multiplier_of
from pt2mx.kernels.reference import error_sums, scales
from pt2mx.kernels.reference_chunked import split
from pt2mx.kernels.select import run_step
from pt2mx.spec import MXSpec

#: the power of two of each E8M0 byte
_POWERS = torch.tensor([*(2.0 ** (byte - 127) for byte in range(NAN_SCALE)), math.nan], device="cpu")
#: the definitions of the steps below
_DEFINITIONS: dict[str, Callable[..., Any]] = {"block_scales": scales, "error_sums": error_sums}


def quantization_sums(x: Tensor, spec: MXSpec, tensor_scale: Tensor | None = None) -> dict[str, Tensor]:
    """Return the sums over one tensor. Add them up for several tensors.

    Args:
        x: (..., n, ...) float32, float16 or bfloat16.
        spec: the format of x.
        tensor_scale: () float32, of formats with a scale a tensor; by default `tensor_scale_mx(x)`.

    Returns:
        0-d tensors: `tensors` (1), `empty` (1 if x has no value), `values` (count), `nonfinite` (count of Inf and NaN);
        and over the blocks without Inf and NaN: `signal` (sum of x**2), `noise` (sum of (x - quantized x)**2),
        `saturated` (count of |x| above the largest value of its block), `flushed` (count of x != 0 that became 0).
        `exponents`: (256,), the count of blocks for each E8M0 byte; a scale with a significand, times the tensor scale,
        counts as the power of two below it. Counts are int64, powers float64.

    Raises:
        MXError: for a scale of more than 8 exponent bits.
    """
    if spec.scale_exp_bits > 8:
        raise MXError(f"{spec}: statistics count scales by their E8M0 byte; scale_exp_bits must be at most 8")
    x = torch.atleast_1d(x)
    spec = _from_front(spec, x)
    if tensor_scale is None:
        tensor_scale = _tensor_scale(x, spec)
    values = torch.tensor(x.numel(), device=x.device)
    counts = {"tensors": torch.ones_like(values), "empty": (values == 0).to(torch.int64), "values": values}
    return counts | _added([_sums(part, spec, tensor_scale) for part in _slices(x, spec)])


def _added(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add up sums by their names."""
    total, *others = parts
    for part in others:
        total = {name: total[name] + part[name] for name in total}
    return total


def _sums(x: Tensor, spec: MXSpec, tensor_scale: Tensor | None) -> dict[str, Tensor]:
    stored = _run("block_scales", x, spec, tensor_scale)
    exponent = exponent_bytes(stored, spec, tensor_scale)
    is_power = spec.has_power_of_two_scale
    scale = _POWERS.to(x.device)[exponent] if is_power else multiplier_of(stored, spec, tensor_scale)
    names = ("nonfinite", "saturated", "flushed", "signal", "noise")
    sums = _run("error_sums", x, fake_quantize_mx(x, spec, tensor_scale=tensor_scale), scale, spec)
    exponents = torch.zeros(256, dtype=torch.int64, device=x.device)
    counts = exponents.index_add(0, exponent.flatten(), torch.ones_like(exponent).flatten())
    return dict(zip(names, sums, strict=True)) | {"exponents": counts}


def _run(step: str, *args: Any) -> Any:
    """Run the kernel of a step. A compiler traces the definition: it cannot trace the lookup of a kernel."""
    return _DEFINITIONS[step](*args) if torch.compiler.is_compiling() else run_step(step, *args)


def exponent_bytes(stored: Tensor, spec: MXSpec, tensor_scale: Tensor | None) -> Tensor:
    """Return the E8M0 byte of the power of two at or below each scale, int64; `NAN_SCALE` for NaN.

    `stored` are scales as `quantize_mx` gives them; `tensor_scale`, of formats that have one, multiplies them.
    """
    if spec.has_power_of_two_scale:
        return stored.to(torch.int64)
    scale = multiplier_of(stored, spec, tensor_scale)
    power = torch.frexp(scale).exponent.to(torch.int64) - 1
    return torch.where(scale.isnan(), NAN_SCALE, (power + 127).clamp(0, NAN_SCALE - 1))


def _from_front(spec: MXSpec, x: Tensor) -> MXSpec:
    """Return the spec with its axis counted from the front. Most are: to make a spec takes as long as a kernel."""
    axis = spec.axis % x.dim()
    return spec if axis == spec.axis else spec.replace(axis=axis)


def _slices(x: Tensor, spec: MXSpec) -> list[Tensor]:
    """Return x in slices of whole blocks."""
    row_axis = spec.row_axis(x.dim()) if spec.block_rows > 1 else None
    _, parts = split(spec.axis, x, rows=spec.block_rows, row_axis=row_axis)
    return [part for (part,) in parts]


def _tensor_scale(x: Tensor, spec: MXSpec) -> Tensor | None:
    """Return the tensor scale of x, whose slices would each have another; None for formats without one."""
    return tensor_scale_mx(x, spec) if spec.has_tensor_scale else None


def quantization_noise(
    tensors: Iterable[Tensor], spec: MXSpec, tensor_scales: Iterable[Tensor | None] = ()
) -> QuantizationStatistics:
    """Return the statistics of tensors, without the slow counts: `saturated` and `flushed` are NaN, and `exponents` is
    empty. Tensors with an Inf or a NaN get all statistics, because only `quantization_sums` leaves such blocks out.

    Args:
        tensors: at least one, each as in `quantization_sums`.
        tensor_scales: one of each tensor, as in `quantization_sums`; by default None.
    """
    tensors = [torch.atleast_1d(x) for x in tensors]
    scales = list(tensor_scales) or [None] * len(tensors)
    scaled = list(zip(tensors, scales, strict=True))
    noise = math.sqrt(sum(_noise(x, spec, t) ** 2 for x, t in scaled))
    if not math.isfinite(noise):
        return QuantizationStatistics.of(_added([quantization_sums(x, spec, t) for x, t in scaled]))
    return _statistics([x.numel() for x in tensors], math.hypot(*map(_norm, tensors)), noise)


def rounding_noise(x: Tensor, rounded: Tensor) -> QuantizationStatistics:
    """Return the statistics of a finite tensor and of rounded values in its place, as `quantization_noise` does."""
    return _statistics([x.numel()], _norm(x), _norm(rounded.float() - x))


def _statistics(values: list[int], signal: float, noise: float) -> QuantizationStatistics:
    """Return statistics without counts; `values` are the numbers of values in each tensor, the others norms."""
    return QuantizationStatistics(
        tensors=len(values),
        empty=values.count(0),
        values=sum(values),
        nonfinite=0,
        sqnr=sqnr_db(signal**2, noise**2) if any(values) else math.nan,
        saturated=math.nan,
        flushed=math.nan,
        exponents={},
        nan_blocks=0,
    )


def _noise(x: Tensor, spec: MXSpec, tensor_scale: Tensor | None) -> float:
    """Return the norm of the noise of a tensor."""
    spec = _from_front(spec, x)
    if tensor_scale is None:
        tensor_scale = _tensor_scale(x, spec)
    norms = []
    for part in _slices(x, spec):
        quantized = fake_quantize_mx(part, spec, tensor_scale=tensor_scale)
        norms.append(_norm(quantized.float().sub_(part)))
    return math.hypot(*norms)


def _norm(x: Tensor) -> float:
    """Return the norm of a tensor, in float64 if a square may exceed float32."""
    norm = float(torch.linalg.vector_norm(x, dtype=torch.float32))
    return norm if 1e-15 < norm < 1e15 else float(torch.linalg.vector_norm(x, dtype=torch.float64))


def sqnr_db(signal: float, noise: float) -> float:
    """Return the ratio of signal power to quantization noise power in dB; inf without noise."""
    if noise == 0:
        return math.inf
    if noise == math.inf:  # a scale mode that dequantizes to Inf in the top binade
        return -math.inf
    if signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else math.nan


@dataclass(frozen=True)
class QuantizationStatistics:
    """The quantization errors of tensors in a format.

    `tensors` counts the tensors, `empty` those without a value, `values` all values, `nonfinite` the Inf and NaN among
    them, and `nan_blocks` the blocks with such values, which become NaN. The other fields describe the other blocks:
    `sqnr` in dB (NaN without such blocks), the shares of all values that `saturated` or were `flushed` to zero, and
    `exponents`, which counts the blocks by their unbiased shared exponent. If only the noise was computed, the shares
    are NaN and `exponents` is empty.
    """

    tensors: int
    empty: int
    values: int
    nonfinite: int
    sqnr: float
    saturated: float
    flushed: float
    exponents: dict[int, int]
    nan_blocks: int

    @property
    def relative_noise(self) -> float:
        """Noise power over signal power: 0 without noise, Inf if the format lost the whole signal."""
        return 10 ** (-self.sqnr / 10)

    @classmethod
    def from_sums(cls, sums: dict[str, Tensor]) -> QuantizationStatistics | None:
        """Return the statistics of (added) `quantization_sums`; None if no tensor was seen."""
        return cls.of(sums) if int(sums["tensors"]) else None

    @classmethod
    def of(cls, sums: dict[str, Tensor]) -> QuantizationStatistics:
        """Return the statistics of (added) `quantization_sums` of at least one tensor."""
        values = int(sums["values"])
        *blocks, nan_blocks = sums["exponents"].tolist()
        exponents = {byte - 127: count for byte, count in enumerate(blocks) if count}
        return cls(
            tensors=int(sums["tensors"]),
            empty=int(sums["empty"]),
            values=values,
            nonfinite=int(sums["nonfinite"]),
            sqnr=sqnr_db(float(sums["signal"]), float(sums["noise"])) if exponents else math.nan,
            saturated=int(sums["saturated"]) / max(values, 1),
            flushed=int(sums["flushed"]) / max(values, 1),
            exponents=exponents,
            nan_blocks=nan_blocks,
        )
