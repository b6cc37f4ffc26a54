"""`Case`: one format of an implementation, as the arguments of `pt2mx.conformance.check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """The fields are arguments of `pt2mx.conformance.check`; `variant` tells cases of one format apart."""

    format: str
    quantize: Callable[[Any], Any] | None = None
    dequantize: Callable[[Any, Any], Any] | None = None
    scale_mode: str | None = None
    rounding: str | None = None
    packing: str | None = None
    full_range: bool | None = None
    framework: str = "torch"
    dtype: str = "float32"
    elements_only: bool = False
    variant: str = ""
