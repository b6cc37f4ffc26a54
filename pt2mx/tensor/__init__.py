"""`MXTensor`, the eager face of the operators, with the torch operators that it takes."""

from pt2mx.tensor import dispatch as _dispatch  # noqa: F401 - register the torch operators
from pt2mx.tensor.mx_tensor import MXTensor

__all__ = ["MXTensor"]
