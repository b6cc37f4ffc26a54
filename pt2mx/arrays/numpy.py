"""Convert NumPy arrays to torch tensors, and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pt2mx.errors import MXError
from pt2mx.functional import fake_quantize_mx
from pt2mx.spec import MXSpec

_TAKEN = "torch tensors, NumPy arrays and JAX arrays of dtype float32, float16 or bfloat16"


def fake_quantize_numpy(x: np.ndarray, spec: MXSpec, seed: int | torch.Generator | None) -> np.ndarray:
    """Return `fake_quantize_mx` of a NumPy array (...) of an allowed dtype, in the same shape and dtype."""
    y = fake_quantize_mx(torch_from_numpy(x), spec, seed=seed)
    if y.dtype == torch.bfloat16:  # NumPy itself has no bfloat16
        return y.view(torch.int16).numpy().view(x.dtype)
    return y.numpy().astype(x.dtype, copy=False)


def check_dtype(name: str) -> None:
    """Raise `MXError` if the dtype of that name cannot be quantized."""
    if name not in ("float32", "float16", "bfloat16"):
        raise MXError(
            f"cannot quantize an array of dtype {name} to an MX format: allowed are float32, float16 and bfloat16; "
            "cast it first, for example with x.astype('float32')"
        )


def as_numpy(data: object) -> np.ndarray:
    """Return `data`, a NumPy array or scalar of an allowed dtype; raise `MXError` for anything else."""
    if isinstance(data, bool | int | float | list | tuple) and not isinstance(data, np.generic):
        raise MXError(
            f"cannot quantize a Python {type(data).__name__}: convert it first, for example with "
            f"numpy.asarray(x, dtype='float32') or torch.tensor(x); taken are {_TAKEN}"
        )
    if not isinstance(data, np.ndarray | np.generic) or isinstance(data, np.ma.MaskedArray):
        raise MXError(
            f"cannot quantize a {type(data).__module__}.{type(data).__qualname__}: taken are {_TAKEN}; convert it "
            "first, for example with numpy.asarray(x)"
        )
    check_dtype(data.dtype.name)
    return np.asarray(data)


def torch_from_numpy(x: np.ndarray) -> Tensor:
    """Return x as a torch tensor, in place if torch can describe its memory. Do not write to it: x may be read-only."""
    if any(stride < 0 for stride in x.strides):
        x = x.copy()  # raise before torch reads it, because torch's DLPack import ends the process
    bits = x.view(np.int16) if x.dtype.name == "bfloat16" else x
    try:
        shared = torch.from_dlpack(bits)
    except BufferError:  # another byte order, strides between values, read-only memory in NumPy before 2.1
        shared = torch.from_dlpack(bits.astype(bits.dtype.newbyteorder("=")))
    return shared if bits is x else shared.view(torch.bfloat16)
