"""pychop's functions on arrays: quantize, measure, compare."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from pt2mx import arrays
from pt2mx.analysis import compare
from pt2mx.pychop.backend import as_array, as_numpy, cast, result_dtype, to_float
from pt2mx.pychop.formats import MX_FORMATS, MXSpec, resolve

_BITS_OF_MB = 8 * 2**20


def mx_quantize(
    data: object,
    format: str | MXSpec | tuple[int, int] = "mxfp8_e4m3",
    block_size: int = 32,
    scale_exp_bits: int | None = None,
    scale_sig_bits: int | None = None,
    backend: str | None = None,
) -> Any:
    """Quantize and dequantize in blocks over the flattened array, as `pychop.mx_quantize` does.

    Unlike in pychop, every array library uses `block_size`. An Inf or a NaN makes its block NaN, and integers become
    float32.

    Args:
        data: (...) torch or TensorFlow tensor, NumPy or JAX array of real numbers, list, or number.
        format: a key of `MX_FORMATS`, a pair (exponent bits, significand bits), or an `MXSpec`, in its own block size.
        block_size, scale_exp_bits, scale_sig_bits: fields of `MXSpec`, in place of the format's.
        backend: the library whose array is returned, in place of the choice of `pychop.backend`.

    Returns:
        (...) in the dtype of `data`, float32 for integers. The gradient is straight-through: it passes unchanged.

    Raises:
        MXError: for an unknown format or backend, or data other than real numbers.

    Example:
        >>> import numpy as np
        >>> from pt2mx import pychop
        >>> x = np.array([1.0, 2.4, -0.3, 7.0], np.float32)
        >>> pychop.mx_quantize(x, "mxfp8_e4m3")
        array([ 1.    ,  2.5   , -0.3125,  7.    ], dtype=float32)
        >>> pychop.mx_quantize(x, (0, 3), block_size=2)
        array([1. , 2.5, 0. , 7. ], dtype=float32)
    """
    spec = resolve(format, block_size, scale_exp_bits, scale_sig_bits)
    return _quantize(*as_array(data, backend), spec)


def _quantize(lib: str, x: Any, spec: MXSpec) -> Any:
    """Quantize an array of the library `lib`."""
    dtype = result_dtype(x)
    if lib == "tensorflow":
        from pt2mx.pychop import tensorflow

        return tensorflow.through_numpy(x, lambda array: _quantize("numpy", array, spec), dtype)
    return cast(arrays.mx_quantize(to_float(x), spec.to_core(), axis=None), dtype)


class MXTensor:
    """pychop's `MXTensor`: the values of an array in an MX format, and the memory that its codes and scales would take.

    Like pychop's class, it holds values; `pt2mx.MXTensor` holds packed codes. `spec` is the format, and `backend` the
    library of the values.

    Args:
        data, format, block_size, scale_exp_bits, scale_sig_bits, backend: as in `mx_quantize`.

    Raises:
        MXError: as `mx_quantize`.

    Example:
        >>> import numpy as np
        >>> from pt2mx import pychop
        >>> x = pychop.MXTensor(np.array([1.0, 2.4, -0.3, 7.0], np.float32), "mxfp4_e2m1", block_size=4)
        >>> x
        MXTensor(backend=numpy, shape=(4,), format=MXFP4_E2M1)
        >>> x.dequantize()
        array([ 1. ,  2. , -0.5,  6. ], dtype=float32)
        >>> x.statistics()["bits_per_element"]
        6.0
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
        self._values = _quantize(self.backend, x, self.spec)

    def dequantize(self) -> Any:
        """Return the values.

        Returns:
            (...) as `mx_quantize` returns them.
        """
        return self._values

    def statistics(self) -> dict[str, object]:
        """Return sizes under pychop's names. The last block counts as a whole one.

        Returns:
            format, exp_bits, sig_bits, block_size, scale_exp_bits: of the format.
            original_shape, num_blocks, total_elements: of the array.
            compression_ratio_fp32, compression_ratio_fp16: the ratio of the array in these dtypes to codes and scales.
            bits_per_element: bits a value with its share of the scale.
            fp16_memory_mb, mx_memory_mb: of the array in fp16, and of its codes and scales, in units of 2**20 bytes.
            memory_saved_vs_fp16: in percent.
        """
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
            "fp16_memory_mb": 16 * elements / _BITS_OF_MB,
            "mx_memory_mb": blocks * spec.total_bits_per_block / _BITS_OF_MB,
            "memory_saved_vs_fp16": 100 - 100 * bits / (16 * values),
        }

    def __repr__(self) -> str:
        return f"MXTensor(backend={self.backend}, shape={self.original_shape}, format={self.spec.name})"


def create_mx_ste_quantizer(
    spec: MXSpec, block_size: int = 32, scale_exp_bits: int | None = None, scale_sig_bits: int | None = None
) -> Callable[[object], Any]:
    """Return `mx_quantize` in one format, as `pychop.create_mx_ste_quantizer` does.

    Args:
        spec, block_size, scale_exp_bits, scale_sig_bits: as `format` and the others in `mx_quantize`.

    Returns:
        A function of an array, with a straight-through gradient.

    Raises:
        MXError: as `mx_quantize`, for the format.

    Example:
        >>> import torch
        >>> from pt2mx import pychop
        >>> quantize = pychop.create_mx_ste_quantizer(pychop.MX_FORMATS["mxint8"])
        >>> x = torch.tensor([1.0, 2.4, -0.3, 7.0], requires_grad=True)
        >>> y = quantize(x)
        >>> y.detach()
        tensor([ 1.0000,  2.3750, -0.3125,  7.0000])
        >>> torch.autograd.grad(y.sum(), x)
        (tensor([1., 1., 1., 1.]),)
    """
    return functools.partial(mx_quantize, format=resolve(spec, block_size, scale_exp_bits, scale_sig_bits))


def compare_mx_formats(
    data: object,
    formats: Iterable[str | MXSpec | tuple[int, int]] | None = None,
    block_size: int = 32,
    file: TextIO | None = None,
) -> compare.MXComparison:
    """Print a table of the errors of each format on `data`, as `pychop.compare_mx_formats` does, with the columns of
    `pt2mx.compare_mx_formats`.

    Args:
        data: as in `mx_quantize`.
        formats: as `format` there; by default all of `MX_FORMATS`.
        block_size: values that share a scale, over the flattened array.
        file: where the table is printed; by default the standard output.

    Returns:
        A `pt2mx.analysis.compare.MXComparison`: `rows`, the statistics of each format.

    Raises:
        MXError: as `mx_quantize`.

    Example:
        >>> import numpy as np
        >>> from pt2mx import pychop
        >>> x = np.array([1.0, 2.4, -0.3, 7.0], np.float32)
        >>> comparison = pychop.compare_mx_formats(x, ["mxint8", "mxfp4_e2m1"], block_size=4)
        format           bits  SQNR dB  max abs error  mean abs error  saturated %  flushed %  ratio
        mxint8_full{4}  10.00    48.54          0.025        0.009375         0.00       0.00  3.20x
        mxfp4_e2m1{4}    6.00    16.68              1             0.4        25.00       0.00  5.33x
        >>> [row.max_abs_error for row in comparison.rows]
        [0.02500009536743164, 1.0]
    """
    specs = [resolve(format, block_size).to_core() for format in (MX_FORMATS if formats is None else formats)]
    lib, x = as_array(data)
    x = to_float(as_numpy(x) if lib == "tensorflow" else x)
    return compare.compare_mx_formats(x, specs, axis=None, file=file)
