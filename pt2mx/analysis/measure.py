"""Measure the size and the errors of a tensor in an MX format."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from pt2mx.analysis.sums import QuantizationStatistics, quantization_sums
from pt2mx.arrays import as_torch, resolve
from pt2mx.errors import MXError
from pt2mx.functional import fake_quantize_mx
from pt2mx.spec import MXSpec

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class MXStorage:
    """The size of a tensor in an MX format, in bits of codes and scales (packing may round lines up); the scale of a
    whole tensor counts too.

    The fields have the names of pychop's `MXTensor.statistics()`: `exp_bits` is 0 for an integer element, and
    `sig_bits` counts the other bits except the sign. A last block may be shorter; pychop pads it.
    """

    format: str
    exp_bits: int
    sig_bits: int
    block_size: int
    scale_exp_bits: int
    scale_sig_bits: int
    original_shape: tuple[int, ...]
    num_blocks: int
    total_elements: int
    bits_per_element: float
    compression_ratio_fp32: float
    compression_ratio_fp16: float

    @classmethod
    def of(cls, shape: Sequence[int], spec: MXSpec, **fields: Any) -> Self:
        """Return the size of a tensor of that shape whose blocks run along `spec.axis`; `fields` are a subclass's."""
        element = spec.element
        elements = math.prod(shape)
        blocks = math.prod(spec.scale_shape(shape or (1,)))
        scale_bits = blocks * spec.scale_bits + 32 * spec.has_tensor_scale
        bits = element.bits + scale_bits / elements if elements else spec.effective_bits
        exponent, significand = spec.scale_widths
        return cls(
            format=str(spec),
            exp_bits=0 if element.is_int else element.exponent_bits,
            sig_bits=element.bits - 1 if element.is_int else element.mantissa_bits,
            block_size=spec.block_size,
            scale_exp_bits=exponent,
            scale_sig_bits=significand,
            original_shape=tuple(shape),
            num_blocks=blocks,
            total_elements=elements,
            bits_per_element=bits,
            compression_ratio_fp32=32 / bits,
            compression_ratio_fp16=16 / bits,
            **fields,
        )

    def to_dict(self) -> dict[str, object]:
        """Return the fields by name."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class MXStatistics(MXStorage):
    """The size of a tensor in an MX format, and its quantization errors.

    Errors are quantized minus original values, `sqnr` is in dB, `saturated` (beyond the largest value of its block's
    scale) and `flushed` (not zero, but zero in the format) are shares of the values.

    `compression_ratio` compares with `dtype`, the dtype of the data. `scale_exponents` counts the blocks by their
    shared exponent; a scale with a significand, times the tensor scale, counts as the power of two below it.
    `scale_exponent_min` and `scale_exponent_max` are None if no block is finite. `nan_blocks` counts the blocks with an
    Inf or a NaN. They become NaN, and so do SQNR and errors.
    """

    dtype: str
    compression_ratio: float
    sqnr: float
    mean_squared_error: float
    mean_abs_error: float
    max_abs_error: float
    saturated: float
    flushed: float
    scale_exponents: dict[int, int]
    scale_exponent_min: int | None
    scale_exponent_max: int | None
    nan_blocks: int


def mx_statistics(
    data: object,
    format: object = "mxfp8_e4m3",
    block_size: int | None = None,
    axis: int | EllipsisType | None = ...,
    **fields: Any,
) -> MXStatistics:
    """Measure the size and the errors of `data` after `mx_quantize` with the same arguments.

    With stochastic rounding, SQNR and squared error use one draw, and the other errors another.

    Args:
        data: (...) float32, float16 or bfloat16, as `mx_quantize` takes it.
        format: as `pt2mx.parse` takes it.
        block_size: values that share a scale; by default `format`'s block size, or 32.
        axis: the dimension along which blocks run; by default `format`'s axis, or -1. None: blocks run over the
            flattened array.
        fields: further fields of `MXSpec`.

    Returns:
        An `MXStatistics`, which documents its fields: the size under the names of pychop's `MXTensor.statistics()`,
        `compression_ratio`, `sqnr` in dB, `mean_squared_error`, `mean_abs_error`, `max_abs_error`, the shares of values
        that `saturated` and were `flushed` to zero, `scale_exponents` with their ends, and `nan_blocks`.

    Raises:
        MXError: as `mx_quantize`; for a traced JAX array, data without values, and `scale_exp_bits` above 8.

    Example:
        >>> import torch, pt2mx
        >>> statistics = pt2mx.mx_statistics(torch.tensor([0.25, 1.0, 3.0, -7.0]), "mxfp4")
        >>> statistics.max_abs_error, statistics.saturated, statistics.flushed, statistics.bits_per_element
        (1.0, 0.25, 0.25, 6.0)
    """
    spec, flat = resolve(format, axis, block_size=block_size, **fields)
    x = as_torch(data)
    shape = tuple(x.shape)
    if flat:
        x = x.reshape(-1)
    if x.device.type == "meta":
        raise MXError("data on the meta device has no values: there is nothing to measure")
    if not x.numel():
        raise MXError(f"data of shape {shape} has no values: there is nothing to measure")
    error = fake_quantize_mx(x, spec).double().sub_(x).abs_()
    sums = quantization_sums(x, spec)
    seen = QuantizationStatistics.of(sums)
    whole = seen.nan_blocks == 0  # the sums leave out blocks with NaN, but the mean over all values is NaN
    measured: dict[str, Any] = {
        "dtype": str(x.dtype).removeprefix("torch."),
        "sqnr": seen.sqnr if whole else math.nan,
        "mean_squared_error": float(sums["noise"]) / seen.values if whole else math.nan,
        "mean_abs_error": float(error.mean()),
        "max_abs_error": float(error.max()),
        "saturated": seen.saturated,
        "flushed": seen.flushed,
        "scale_exponents": seen.exponents,
        "scale_exponent_min": min(seen.exponents, default=None),
        "scale_exponent_max": max(seen.exponents, default=None),
        "nan_blocks": seen.nan_blocks,
    }
    bits = MXStorage.of(x.shape, spec).bits_per_element
    statistics = MXStatistics.of(x.shape, spec, compression_ratio=8 * x.element_size() / bits, **measured)
    return dataclasses.replace(statistics, original_shape=shape)
