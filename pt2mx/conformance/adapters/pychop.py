"""pychop: `mx_quantize` of NumPy arrays, a row at a time, since its blocks run over all values. It returns values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from pychop.mx_formats import MX_FORMATS, mx_quantize

from pt2mx.conformance.adapters.case import Case
from pt2mx.formats import parse_element


def cases() -> Iterator[Case]:
    """Yield every format."""
    for name in MX_FORMATS:
        yield Case(parse_element(name).name, partial(_quantize, name), framework="numpy")


def _quantize(name: str, x: np.ndarray) -> np.ndarray:
    rows = [x] if x.shape[1] % 32 == 0 else list(x)
    return np.concatenate([np.asarray(mx_quantize(row, name, 32, backend="numpy")).ravel() for row in rows]).reshape(
        x.shape
    )
