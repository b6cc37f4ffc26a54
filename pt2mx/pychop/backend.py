"""pychop's choice of an array library: that of the data ("auto"), or the one that the process was told."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pt2mx.errors import MXError, nearest
from pt2mx.extras import import_extra

#: the environment variable in which pychop keeps its backend; it chooses the type of results, and changes no number
_VARIABLE = "chop_backend"
_BACKENDS = ("auto", "numpy", "torch", "jax")


def backend(lib: str = "auto", verbose: int | bool = 0) -> None:
    """Choose the library whose arrays results are, as `pychop.backend` does, for the whole process.

    The choice is kept in the environment variable `chop_backend`. It changes the type of results, and no number.

    Args:
        lib: "numpy", "torch", "jax", or "auto", that of the data (NumPy for lists and numbers). Unlike pychop, there is
            no "tensorflow".
        verbose: true to print the choice.

    Raises:
        MXError: for another name.

    Example:
        >>> from pt2mx import pychop
        >>> pychop.backend("torch", verbose=1)
        pt2mx.pychop: backend torch
        >>> pychop.mx_quantize([1.0, 2.4], "mxfp4_e2m1")
        tensor([1., 2.], dtype=torch.float64)
        >>> pychop.backend("auto")
        >>> pychop.mx_quantize([1.0, 2.4], "mxfp4_e2m1")
        array([1., 2.])
    """
    os.environ[_VARIABLE] = _checked(lib)
    if verbose:
        print(f"pt2mx.pychop: backend {lib}")


def get_backend() -> str:
    """Return the library that `backend` or the environment variable `chop_backend` chose, as `pychop.get_backend` does.

    Returns:
        "numpy", "torch", "jax" or "auto", which is the default.

    Example:
        >>> from pt2mx import pychop
        >>> pychop.backend("numpy")
        >>> pychop.get_backend()
        'numpy'
        >>> pychop.backend("auto")
    """
    return os.environ.get(_VARIABLE, "auto")


def as_array(data: object, lib: str | None = None) -> tuple[str, Any]:
    """Return the library that `lib` or `backend` chose, and `data` (an array of any, a list or a number) as its array.

    Raises:
        MXError: for another library, and for data that is no array of numbers.
    """
    lib = _checked(get_backend() if lib is None else lib)
    own = _library_of(data)
    lib = own if lib == "auto" else lib
    if own == lib and (own != "numpy" or isinstance(data, np.ndarray)):
        return lib, data
    plain = _as_numpy(data)
    if lib == "torch":
        return lib, torch.tensor(plain)
    return lib, import_extra("jax", "jax").numpy.asarray(plain) if lib == "jax" else plain


def to_float(x: Any) -> tuple[Any, str]:
    """Return x, an array of any library, in a dtype that is quantized, and the name of the dtype that results of it
    have: float32 for integers.

    Raises:
        MXError: for complex numbers and what is no number.
    """
    name = str(x.dtype).removeprefix("torch.")
    if name in ("float32", "float16", "bfloat16"):
        return x, name
    if not name.startswith(("float64", "int", "uint", "bool")):
        raise MXError(f"cannot quantize an array of dtype {name}: give real numbers, for example in float32")
    with np.errstate(over="ignore"):  # beyond float32 a value is Inf, as in torch
        return cast(x, "float32"), name if name == "float64" else "float32"


def cast(x: Any, dtype: str) -> Any:
    """Return x, an array of any library, in the dtype of that name."""
    if isinstance(x, Tensor):
        return x.to(getattr(torch, dtype))
    return x if str(x.dtype) == dtype else x.astype(dtype)


def _checked(lib: str) -> str:
    if lib in ("tensorflow", "tf"):
        raise MXError("TensorFlow is left out: choose 'numpy', 'torch', 'jax' or 'auto', and pass tensor.numpy()")
    if lib not in _BACKENDS:
        raise MXError(f"unknown backend {lib!r}: {nearest(lib, _BACKENDS)}")
    return lib


def _library_of(data: object) -> str:
    """The library of an array, found out without importing it; NumPy's for anything else."""
    if isinstance(data, Tensor):
        return "torch"
    module = type(data).__module__.partition(".")[0]
    if module == "tensorflow":
        raise MXError("TensorFlow is left out: pass tensor.numpy()")
    return "jax" if module in ("jax", "jaxlib") else "numpy"


def _as_numpy(data: object) -> np.ndarray:
    if isinstance(data, Tensor):
        data = data.detach().cpu()
        data = data.float() if data.dtype == torch.bfloat16 else data  # NumPy has no such dtype
    try:
        return np.asarray(data)
    except ValueError as error:
        raise MXError(f"cannot quantize {data!r}: it is no array of numbers ({error})") from None
