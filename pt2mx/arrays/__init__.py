"""`mx_quantize`: quantize and dequantize arrays of torch, NumPy and JAX with the same kernels."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Generator, Tensor

from pt2mx.arrays.numpy import as_numpy, fake_quantize_numpy, torch_from_numpy
from pt2mx.functional import fake_quantize_mx
from pt2mx.ops.checks import check_tensors
from pt2mx.spec import MXSpec, parse

if TYPE_CHECKING:
    import jax


def mx_quantize(
    data: object,
    format: object = "mxfp8_e4m3",
    block_size: int | None = None,
    axis: int | EllipsisType | None = ...,
    scale_mode: str | None = None,
    rounding: str | None = None,
    scale_exp_bits: int | None = None,
    scale_sig_bits: int | None = None,
    seed: int | Generator | jax.Array | None = None,
) -> Any:
    """Quantize an array of torch, NumPy or JAX to an MX format, and dequantize it, as `fake_quantize_mx` does.

    Args:
        data: (...) float32, float16 or bfloat16 (in NumPy from `ml_dtypes`); a torch tensor, a NumPy array or a JAX
            array. The kernels read its memory in place. They copy only a NumPy array that torch cannot describe
            (negative strides, another byte order).
        format: as `pt2mx.parse` takes it: a key of `MX_FORMATS` or another spelling, an `MXSpec`, or a pair `(exponent
            bits, significand bits)`; `(0, 7)` is int8.
        block_size: values that share a scale; by default `format`'s block size, or 32.
        axis: the dimension along which blocks run; by default `format`'s axis, or -1. None: blocks run over the
            flattened array, as in pychop.
        scale_mode: how the shared exponent follows from the block's values; by default `format`'s scale mode.
        rounding: how values are rounded to the element's grid; by default `format`'s rounding.
        scale_exp_bits: bits of the shared exponent; by default as in `format`.
        scale_sig_bits: bits of a scale's significand; by default as in `format`.
        seed: of `rounding="stochastic"`: an integer, a torch generator, or None for another draw each call. For a JAX
            array, an integer JAX scalar too. `jax.jit` and `jax.vmap` need one of the two integers, because their
            functions must be pure.

    Returns:
        An array of the library, shape, dtype and device of `data`, in its own memory. The gradient of a torch tensor or
        a JAX array is straight-through: it passes unchanged. JAX may trace the array (`jit`, `vmap`, `grad`, `jvp`);
        compiled programs call back to the host.

    Raises:
        MXError: for another type or dtype (float64 too: nothing is cast silently), an unknown format or mode, a block
            size below 1, an axis out of range.

    Example:
        >>> import numpy, pt2mx
        >>> pt2mx.mx_quantize(numpy.array([0.3, 1.0, 2.9, -7.0], dtype="float32"), "mxfp4")
        array([ 0.5,  1. ,  3. , -6. ], dtype=float32)
    """
    spec, flat = resolve(
        format,
        axis,
        block_size=block_size,
        scale_mode=scale_mode,
        rounding=rounding,
        scale_exp_bits=scale_exp_bits,
        scale_sig_bits=scale_sig_bits,
    )
    if isinstance(data, Tensor):
        check_tensors(data=data)
        y = fake_quantize_mx(data.reshape(-1) if flat else data, spec, seed=seed)
        return y.reshape(data.shape) if flat else y
    if _is_jax(data):
        from pt2mx.arrays import jax as jax_bridge

        return jax_bridge.fake_quantize(data, spec, flat, seed)
    array = as_numpy(data)
    quantized = fake_quantize_numpy(array.reshape(-1) if flat else array, spec, seed).reshape(array.shape)
    return quantized[()] if isinstance(data, np.generic) else quantized


def resolve(format: object, axis: int | EllipsisType | None, **fields: Any) -> tuple[MXSpec, bool]:
    """Return the spec of `format`, with the `fields` that are not None; and whether its blocks run over the flattened
    array (`axis=None`; the spec's axis is then -1)."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if axis is not ...:
        fields["axis"] = -1 if axis is None else axis
    return parse(format, **fields), axis is None


def as_torch(data: object) -> Tensor:
    """Return the values of an array of any library as a torch tensor (...), which shares memory if torch can describe
    it.

    Raises:
        MXError: for another type or dtype, and for a traced JAX array.
    """
    if isinstance(data, Tensor):
        return data.detach()
    if _is_jax(data):
        from pt2mx.arrays import jax as jax_bridge

        return jax_bridge.as_torch(data)
    return torch_from_numpy(as_numpy(data))


def _is_jax(data: object) -> bool:
    """Return whether `data` is a JAX array, without importing JAX."""
    return type(data).__module__.partition(".")[0] in ("jax", "jaxlib")
