"""pychop's functions on arrays: quantize, measure, compare."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import TextIO

from pt2mx import arrays
from pt2mx.analysis import compare
from pt2mx.pychop.backend import as_array, cast, to_float
from pt2mx.pychop.formats import MX_FORMATS, MXSpec, resolve


def mx_quantize(
    data: object,
    format: str | MXSpec | tuple[int, int] = "mxfp8_e4m3",
    block_size: int = 32,
    scale_exp_bits: int | None = None,
    scale_sig_bits: int | None = None,
    backend: str | None = None,
) -> object:
    """The values of `data` after quantization, in blocks over the flattened array.

    Args:
        data: (...) torch tensor, NumPy or JAX array of real numbers, list, or number.
        format: a key of `MX_FORMATS`, a pair (exponent bits, significand bits), or an `MXSpec`, in its own block size.
        block_size, scale_exp_bits, scale_sig_bits: fields of `MXSpec`, in place of the format's.
        backend: the library whose array is returned, in place of what `pychop.backend` says.

    Returns:
        (...) in the dtype of `data`, float32 for integers. The gradient is straight-through: it passes unchanged.

    Raises:
        MXError: for an unknown format or backend, or data that are no real numbers.
    """
    spec = resolve(format, block_size, scale_exp_bits, scale_sig_bits)
    return _quantize(as_array(data, backend)[1], spec)


def _quantize(x: object, spec: MXSpec) -> object:
    x, dtype = to_float(x)
    return cast(arrays.mx_quantize(x, spec.to_core(), axis=None), dtype)


class MXTensor:
    """The values of an array in an MX format, and how much memory its codes and scales would take.

    Arguments and errors are those of `mx_quantize`. `backend` is the library of the values, `spec` the format. (The
    tensor of packed codes is `pt2mx.MXTensor`.)
    """

    def __init__(
        self,
        data: object,
        format: str | MXSpec | tuple[int, int] = "mxfp8_e4m3",
        block_size: int = 32,
        scale_exp_bits: int | None = None,
        scale_sig_bits: int | None = None,
        backend: str | None = None,
    ) -> None:
        self.spec = resolve(format, block_size, scale_exp_bits, scale_sig_bits)
        self.backend, x = as_array(data, backend)
        self.original_shape = tuple(x.shape)
        self._values = _quantize(x, self.spec)

    def dequantize(self) -> object:
        """The values, (...) as `mx_quantize` returns them."""
        return self._values

    def statistics(self) -> dict[str, object]:
        """Widths, blocks, bits a value and compression ratios; a last block counts as whole."""
        spec, elements = self.spec, math.prod(self.original_shape)
        blocks = -(-elements // spec.block_size)
        values, bits = (
            (elements, blocks * spec.total_bits_per_block) if elements else (spec.block_size, spec.total_bits_per_block)
        )
        return {
            "format": spec.name,
            "exp_bits": spec.exp_bits,
            "sig_bits": spec.sig_bits,
            "block_size": spec.block_size,
            "scale_exp_bits": spec.scale_exp_bits,
            "original_shape": self.original_shape,
            "num_blocks": blocks,
            "total_elements": elements,
            "compression_ratio_fp32": 32 * values / bits,
            "compression_ratio_fp16": 16 * values / bits,
            "bits_per_element": bits / values,
        }

    def __repr__(self) -> str:
        return f"MXTensor(backend={self.backend}, shape={self.original_shape}, format={self.spec.name})"


def create_mx_ste_quantizer(
    spec: MXSpec, block_size: int = 32, scale_exp_bits: int | None = None, scale_sig_bits: int | None = None
) -> Callable[[object], object]:
    """`mx_quantize` in one format, as a function of the data."""
    return functools.partial(mx_quantize, format=resolve(spec, block_size, scale_exp_bits, scale_sig_bits))


def compare_mx_formats(
    data: object,
    formats: Iterable[str | MXSpec | tuple[int, int]] | None = None,
    block_size: int = 32,
    file: TextIO | None = None,
) -> compare.MXComparison:
    """Print what each format makes of `data`, and return it, as `pt2mx.compare_mx_formats` does; blocks run over the
    flattened array."""
    specs = [resolve(format, block_size).to_core() for format in (MX_FORMATS if formats is None else formats)]
    x, _ = to_float(as_array(data)[1])
    return compare.compare_mx_formats(x, specs, axis=None, file=file)
