"""`mx_quantize`: the arrays of torch, NumPy and JAX, quantized and dequantized by the same kernels."""

from __future__ import annotations

from types import EllipsisType

import numpy as np
from torch import Tensor

from pt2mx.arrays.numpy import as_numpy, fake_quantize_numpy, torch_from_numpy
from pt2mx.functional import fake_quantize_mx
from pt2mx.spec import MXSpec, parse


def mx_quantize(
    data: object,
    format: object = "mxfp8_e4m3",
    block_size: int | None = None,
    axis: int | EllipsisType | None = ...,
    scale_mode: str | None = None,
    rounding: str | None = None,
    scale_exp_bits: int | None = None,
    scale_sig_bits: int | None = None,
    seed: object = None,
) -> object:
    """The values of `data` after quantization to an MX format: quantized and dequantized, as `fake_quantize_mx` does.

    Args:
        data: (...) float32, float16 or bfloat16; a torch tensor, a NumPy array (bfloat16 being that of `ml_dtypes`) or
            a JAX array. The kernels read its memory in place, save that of a NumPy array that torch cannot describe
            (negative strides, another byte order).
        format: as `pt2mx.parse` takes it: a key of `MX_FORMATS` or another spelling, an `MXSpec`, or a pair
            `(exponent bits, significand bits)`, `(0, 7)` being int8.
        block_size: values that share a scale; by default that of `format`, 32 where it names none.
        axis: the dimension along which blocks run; by default that of `format`, -1 where it names none. None lets them
            run over the flattened array, as pychop does.
        scale_mode, rounding, scale_exp_bits, scale_sig_bits: fields of `MXSpec`; by default those of `format`.
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
        y = fake_quantize_mx(data.reshape(-1) if flat else data, spec, seed=seed)
        return y.reshape(data.shape) if flat else y
    if _is_jax(data):
        from pt2mx.arrays import jax as jax_bridge

        return jax_bridge.fake_quantize(data, spec, flat, seed)
    x = as_numpy(data)
    y = fake_quantize_numpy(x.reshape(-1) if flat else x, spec, seed).reshape(x.shape)
    return y[()] if isinstance(data, np.generic) else y


def resolve(format: object, axis: int | EllipsisType | None, **fields: object) -> tuple[MXSpec, bool]:
    """The spec that `format` names, with the `fields` that are not None, and whether its blocks run over the flattened
    array (`axis=None`; the spec's axis is then -1)."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if axis is not ...:
        fields["axis"] = -1 if axis is None else axis
    return parse(format, **fields), axis is None


def as_torch(data: object) -> Tensor:
    """A torch tensor (...) of the values of an array of any library, sharing its memory where torch can describe it.

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
    """Whether `data` is of JAX, found out without importing it."""
    return type(data).__module__.partition(".")[0] in ("jax", "jaxlib")
