"""Choose an array library as pychop does: the library of the data ("auto"), or one that is set for the process."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pt2mx.errors import MXError, nearest
from pt2mx.extras import import_extra

#: dtypes that the kernels take
_QUANTIZED = ("float32", "float16", "bfloat16")
#: the environment variable in which pychop keeps its backend; it chooses the type of results, and changes no number
_VARIABLE = "chop_backend"
_BACKENDS = ("auto", "numpy", "torch", "jax", "tensorflow")


def backend(lib: str = "auto", verbose: int | bool = 0) -> None:
    """Choose the array library of results for the whole process, as `pychop.backend` does.

    The environment variable `chop_backend` keeps the choice. The choice changes the type of results, and no number.

    Args:
        lib: "numpy", "torch", "jax", "tensorflow" (or "tf"), or "auto": the library of the data, NumPy's for lists and
            numbers.
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
    os.environ[_VARIABLE] = lib = _checked(lib)
    if verbose:
        print(f"pt2mx.pychop: backend {lib}")


def get_backend() -> str:
    """Return the library that `backend` or the environment variable `chop_backend` chose, as `pychop.get_backend` does.

    Returns:
        "numpy", "torch", "jax", "tensorflow" or "auto", which is the default.

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
    lib_of_data = _library_of(data)
    lib = lib_of_data if lib == "auto" else lib
    if lib_of_data == lib and (lib_of_data != "numpy" or isinstance(data, np.ndarray)):
        return lib, data
    plain = as_numpy(data)
    if lib == "torch":
        return lib, torch.tensor(plain)
    if lib == "tensorflow":
        return lib, import_extra("tensorflow", "tensorflow").convert_to_tensor(plain)
    return lib, import_extra("jax", "jax").numpy.asarray(plain) if lib == "jax" else plain


def result_dtype(x: Any) -> str:
    """Return the name of the dtype in which x, an array of any library, is quantized: its own, or float32 for integers.

    Raises:
        MXError: for complex numbers and for other values than numbers.
    """
    name = _dtype_of(x)
    if name in ("float64", *_QUANTIZED):
        return name
    if not name.startswith(("int", "uint", "bool")):
        raise MXError(f"cannot quantize an array of dtype {name}: give real numbers, for example in float32")
    return "float32"


def to_float(x: Any) -> Any:
    """Return x, an array of torch, NumPy or JAX, in a dtype that is quantized.

    Raises:
        MXError: as `result_dtype`.
    """
    if _dtype_of(x) in _QUANTIZED:
        return x
    result_dtype(x)
    with np.errstate(over="ignore"):  # beyond float32 a value is Inf, as in torch
        return cast(x, "float32")


def cast(x: Any, dtype: str) -> Any:
    """Return x, an array of torch, NumPy or JAX, in the dtype of that name."""
    if isinstance(x, Tensor):
        return x.to(getattr(torch, dtype))
    return x if str(x.dtype) == dtype else x.astype(dtype)


def _checked(lib: str) -> str:
    lib = "tensorflow" if lib == "tf" else lib
    if lib not in _BACKENDS:
        raise MXError(f"unknown backend {lib!r}: {nearest(lib, _BACKENDS)}")
    return lib


def _dtype_of(x: Any) -> str:
    return str(getattr(x.dtype, "name", x.dtype)).removeprefix("torch.")


def _library_of(data: object) -> str:
    """Return the library of an array without importing that library; NumPy for any other object."""
    if isinstance(data, Tensor):
        return "torch"
    if any("tensorflow" in kind.__module__.split(".") for kind in type(data).__mro__):  # Keras's variables too
        return "tensorflow"
    return "jax" if type(data).__module__.partition(".")[0] in ("jax", "jaxlib") else "numpy"


def as_numpy(data: object) -> np.ndarray:
    """Return the values of `data`, an array of any library, a list or a number, as an array of NumPy; bfloat16 of torch
    becomes float32.

    Raises:
        MXError: for other data than an array of numbers.
    """
    if isinstance(data, Tensor):
        data = data.detach().cpu()
        data = data.float() if data.dtype == torch.bfloat16 else data  # NumPy has no such dtype
    try:
        return np.asarray(data)
    except (ValueError, NotImplementedError) as error:  # of TensorFlow: a tensor that is traced
        raise MXError(f"cannot quantize {data!r}: it is no array of numbers ({error})") from None
