"""The text of MLIR functions."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch

from pt2mx.errors import MXError
from pt2mx.fx.targets.parts import Pair, Shape
from pt2mx.fx.targets.table import MLIR_ELEMENTS

_FLOATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
SCALE = "f8E8M0FNU"


def tensor(shape: Shape, element: str) -> str:
    """Return a type as `tensor<8x64xf32>`; a symbolic size is `?`."""
    sizes = ("?" if isinstance(n, str) else str(n) for n in shape)
    return f"tensor<{'x'.join((*sizes, element))}>"


def float_type(dtype: torch.dtype) -> str:
    """Return the type of a float.

    Raises:
        MXError: for another dtype than float32, float16 and bfloat16.
    """
    if dtype not in _FLOATS:
        raise MXError(f"a tensor is of {dtype}, and MLIR text is written for {', '.join(map(str, _FLOATS))}")
    return _FLOATS[dtype]


def types_of(pair: Pair, rows: Shape | None = None) -> tuple[str, str, str]:
    """Return the types of the codes, the scales and the values of a tensor, with other leading dimensions if given."""
    shape, scales = pair.shape, pair.scale_shape
    if rows is not None:
        shape, scales = (*rows, shape[-1]), (*rows, scales[-1])
    element = MLIR_ELEMENTS[pair.spec.element.name]
    return tensor(shape, element), tensor(scales, SCALE), tensor(shape, float_type(pair.dtype))


def rows_of(shape: Shape) -> int | str:
    """Return the number of rows of a tensor as a matrix, "?" if a size is symbolic."""
    leading = [n for n in shape[:-1] if isinstance(n, int)]
    return prod(leading) if len(leading) == len(shape) - 1 else "?"


def function(name: str, arguments: Iterable[tuple[str, str]], lines: Iterable[str], result: tuple[str, str]) -> str:
    """Return a function. `arguments` are names and types, `result` the value and the type that it returns."""
    inputs = ", ".join(f"%{argument}: {kind}" for argument, kind in arguments)
    body = "\n".join(f"  {line}" for line in lines)
    value, kind = result
    return f"func.func @{name}({inputs}) -> {kind} {{\n{body}\n  return {value} : {kind}\n}}\n"
