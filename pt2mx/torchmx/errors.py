"""Errors for bad input that TorchMX checks with `assert`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pt2mx.errors import MXError

_P = ParamSpec("_P")
_R = TypeVar("_R")


class MXAssertionError(MXError, AssertionError):
    """Bad input that TorchMX asserts against: an `MXError`, and the `AssertionError` that programs for TorchMX expect.

    Example:
        >>> import torch
        >>> from pt2mx import torchmx
        >>> try:
        ...     torchmx.MXTensor.to_mx(torch.ones(32, dtype=torch.float64), torchmx.dtypes.int8)
        ... except AssertionError as error:
        ...     print(error)
        cannot quantize a tensor of dtype torch.float64 to an MX format: allowed are float32, float16 and bfloat16; ...
    """


def asserts(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that raises an `MXAssertionError` for each `MXError`."""

    @functools.wraps(function)
    def asserting(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except MXError as error:
            raise MXAssertionError(str(error)) from error.__cause__

    return asserting
