"""pychop's functions on arrays: quantize, measure, compare."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pt2mx import arrays
from pt2mx.analysis import compare
from pt2mx.errors import MXError
from pt2mx.pychop.formats import MX_FORMATS, MXSpec, resolve

if TYPE_CHECKING:
    import tensorflow as tf

Format = str | MXSpec | tuple[int, int]

_BITS_OF_MB = 8 * 2**20
#: dtypes that the kernels take
_QUANTIZED = ("float32", "float16", "bfloat16")


def mx_quantize(
    data: object,
    format: Format = "mxfp8_e4m3",
    block_size: int = 32,
    scale_exp_bits: int | None = None,
    scale_sig_bits: int | None = None,
) -> Any:
    """Quantize and dequantize in blocks over the flattened array, as `pychop.mx_quantize` does.

    `data` is a torch or TensorFlow tensor, a NumPy or JAX array of real numbers, a list, or a number. The result is an
    array of its library (NumPy for lists and numbers) in its dtype, float32 for integers. An Inf or a NaN makes its
    block NaN. The gradient passes unchanged. An `MXSpec` has its own block size; every library uses `block_size`.

    Raises:
        MXError: for an unknown format, or data other than real numbers.
    """
    return _quantize(_as_array(data), resolve(format, block_size, scale_exp_bits, scale_sig_bits))


def _quantize(x: Any, spec: MXSpec) -> Any:
    dtype = _result_dtype(x)
    if _library_of(x) == "tensorflow":
        return _through_numpy(x, lambda array: _quantize(array, spec), dtype)
    return _cast(arrays.mx_quantize(_to_float(x), spec.to_core(), axis=None), dtype)


def _through_numpy(x: tf.Tensor, function: Callable[[np.ndarray], np.ndarray], dtype: str) -> tf.Tensor:
    """Return a function of the NumPy array of a TensorFlow tensor or variable (...), eager or inside `tf.function`, as
    a tensor (...) of the dtype of that name; the gradient passes unchanged. MXError for other objects than a dense
    tensor."""
    import tensorflow as tf

    try:
        tensor = tf.convert_to_tensor(x)
    except (TypeError, ValueError) as error:
        raise MXError(f"cannot quantize a {type(x).__name__}: it is no dense tensor ({error})") from None

    @tf.custom_gradient
    def straight_through(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        y = tf.numpy_function(function, [tensor], tf.as_dtype(dtype), stateful=False)
        return tf.ensure_shape(y, tensor.shape), lambda gradient: gradient

    return straight_through(tensor)


def _library_of(data: object) -> str:
    """Return the library of an array without importing that library; NumPy for any other object."""
    if isinstance(data, Tensor):
        return "torch"
    if any("tensorflow" in kind.__module__.split(".") for kind in type(data).__mro__):  # Keras's variables too
        return "tensorflow"
    return "jax" if type(data).__module__.partition(".")[0] in ("jax", "jaxlib") else "numpy"


def _as_array(data: object) -> Any:
    """Return `data`, an array of any library, a list or a number, as an array."""
    return _as_numpy(data) if _library_of(data) == "numpy" else data


def _as_numpy(data: object) -> np.ndarray:
    try:
        return np.asarray(data)
    except (ValueError, NotImplementedError) as error:  # of TensorFlow: a tensor that is traced
        raise MXError(f"cannot quantize {data!r}: it is no array of numbers ({error})") from None


def _dtype_of(x: Any) -> str:
    return str(getattr(x.dtype, "name", x.dtype)).removeprefix("torch.")


def _result_dtype(x: Any) -> str:
    """Return the name of the dtype of x as quantized: its own, or float32 for integers."""
    name = _dtype_of(x)
    if name in ("float64", *_QUANTIZED):
        return name
    if not name.startswith(("int", "uint", "bool")):
        raise MXError(f"cannot quantize an array of dtype {name}: give real numbers, for example in float32")
    return "float32"


def _to_float(x: Any) -> Any:
    """Return x, an array of torch, NumPy or JAX, in a dtype that the kernels take."""
    if _dtype_of(x) in _QUANTIZED:
        return x
    _result_dtype(x)
    with np.errstate(over="ignore"):  # beyond float32 a value is Inf, as in torch
        return _cast(x, "float32")


def _cast(x: Any, dtype: str) -> Any:
    if isinstance(x, Tensor):
        return x.to(getattr(torch, dtype))
    return x if str(x.dtype) == dtype else x.astype(dtype)


class MXTensor:
    """pychop's `MXTensor`: the values of an array in an MX format, and the memory that its codes and scales would take.

    Arguments are those of `mx_quantize`. Like pychop's class, it holds values; `pt2mx.MXTensor` holds packed codes.
    """

    def __init__(
        self,
        data: object,
        format: Format = "mxfp8_e4m3",
        block_size: int = 32,
        scale_exp_bits: int | None = None,
        scale_sig_bits: int | None = None,
    ) -> None:
        self.spec = resolve(format, block_size, scale_exp_bits, scale_sig_bits)
        x = _as_array(data)
        self.backend, self.original_shape = _library_of(x), tuple(x.shape)
        self._values = _quantize(x, self.spec)

    def dequantize(self) -> Any:
        """Return the values, (...), as `mx_quantize` returns them."""
        return self._values

    def statistics(self) -> dict[str, object]:
        """Return sizes under pychop's names. The last block counts as a whole one; `_mb` are units of 2**20 bytes, and
        `memory_saved_vs_fp16` is in percent."""
        spec, elements = self.spec, math.prod(self.original_shape)
        blocks = -(-elements // spec.block_size)
        values, bits = elements, blocks * spec.total_bits_per_block
        if not elements:
            values, bits = spec.block_size, spec.total_bits_per_block
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
    """Return `mx_quantize` in one format, as `pychop.create_mx_ste_quantizer` does."""
    return functools.partial(mx_quantize, format=resolve(spec, block_size, scale_exp_bits, scale_sig_bits))


def compare_mx_formats(
    data: object, formats: Iterable[Format] | None = None, block_size: int = 32
) -> compare.MXComparison:
    """Print and return the errors of each format on `data`, as `pychop.compare_mx_formats` does, by default of all in
    `MX_FORMATS`, with the columns of `pt2mx.compare_mx_formats`."""
    specs = [resolve(format, block_size).to_core() for format in (MX_FORMATS if formats is None else formats)]
    x = _as_array(data)
    x = _as_numpy(x) if _library_of(x) == "tensorflow" else x
    return compare.compare_mx_formats(_to_float(x), specs, axis=None)
