"""`mx_quantize`: the arrays of torch, NumPy and JAX, quantized and dequantized by the same kernels."""

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
        data: (...) float32, float16 or bfloat16; a torch tensor, a NumPy array (bfloat16 being that of `ml_dtypes`) or
            a JAX array. The kernels read its memory in place, save that of a NumPy array that torch cannot describe
            (negative strides, another byte order).
        format: as `pt2mx.parse` takes it: a key of `MX_FORMATS` or another spelling, an `MXSpec`, or a pair
            `(exponent bits, significand bits)`, `(0, 7)` being int8.
        block_size: values that share a scale; by default that of `format`, 32 where it names none.
        axis: the dimension along which blocks run; by default that of `format`, -1 where it names none. None lets them
            run over the flattened array, as pychop does.
        scale_mode: how the shared exponent follows from the block's values; by default that of `format`.
        rounding: how values are rounded to the element's grid; by default that of `format`.
        scale_exp_bits: bits of the shared exponent; by default those of `format`.
        scale_sig_bits: bits of a scale's significand; by default those of `format`.
        seed: of `rounding="stochastic"`: an integer, a torch generator, or None for another draw each call. For a JAX
            array also an integer JAX scalar; under `jax.jit` and `jax.vmap`, whose functions must be pure, one of the
            two integers is needed.

    Returns:
        The library, shape, dtype and device of `data`, in memory of its own. Of a torch tensor and of a JAX array the
        gradient is straight-through: it passes unchanged. JAX arrays may be traced (`jit`, `vmap`, `grad`, `jvp`);
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
    """Return the spec that `format` names, with the `fields` that are not None, and True if its blocks run over the
    flattened array (`axis=None`; the spec's axis is then -1)."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if axis is not ...:
        fields["axis"] = -1 if axis is None else axis
    return parse(format, **fields), axis is None


def as_torch(data: object) -> Tensor:
    """Return a torch tensor (...) of the values of an array of any library, in its memory if torch can describe that.

    Raises:
        MXError: for another type or dtype, and for a JAX array that is traced.
    """
    if isinstance(data, Tensor):
        return data.detach()
    if _is_jax(data):
        from pt2mx.arrays import jax as jax_bridge

        return jax_bridge.as_torch(data)
    return torch_from_numpy(as_numpy(data))


def _is_jax(data: object) -> bool:
    """True if `data` is of JAX, found out without importing it."""
    return type(data).__module__.partition(".")[0] in ("jax", "jaxlib")
