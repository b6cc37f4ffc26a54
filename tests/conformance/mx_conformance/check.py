"""`check`: the corners of one format on any callable of torch or NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mx_conformance import extremes, stored
from mx_conformance.conventions import NONE_OF_THESE, Claim, parse_claim
from mx_conformance.corners import rows_of
from mx_conformance.errors import MXError, nearest
from mx_conformance.examine import CORNERS, Examination
from mx_conformance.result import Conformance
from mx_conformance.subject import Subject


def check(
    quantize: Callable[[Any], Any] | None,
    dequantize: Callable[[Any, Any], Any] | None = None,
    format: object = "mxfp4",
    scale_mode: str | None = None,
    rounding: str | None = None,
    packing: str | None = None,
    full_range: bool | None = None,
    framework: str = "torch",
    dtype: str = "float32",
    elements_only: bool = False,
    name: str = "",
) -> Conformance:
    """Check an implementation of an MX format in exact arithmetic (OCP MX v1.0).

    The specification leaves conventions open: the scale rule, the rounding of ties, the code -128, the order of codes
    in bytes, Inf and NaN. A convention that you name is checked: another one does not conform. One that is None is
    detected: any that fits all cases is an allowed choice, and so is a scale rule that is none of the known ones.

    Args:
        quantize: (x (rows, n) `dtype`) -> dequantized values (rows, n), or the pair (scale, codes): E8M0 bytes
            (rows, ceil(n / 32)) and codes (rows, bytes), of dtypes of one byte. None to check `dequantize` alone.
        dequantize: (codes, scale) uint8, as `quantize` returns them -> values (rows, n) float32.
        format: one of the six formats, as `mx_conformance.formats.parse_element` takes it.
        scale_mode: the scale rule: "floor", "ceil", "rceil", "rceil_v2" (FP4), "even", "even_m0" to "even_m3",
            "doubled", "mse".
        rounding: a key of `mx_conformance.exact.ROUNDINGS`.
        packing: "low_first", "high_first", "halves" (GGUF) or "bytes".
        full_range: True if integers use the code -128.
        framework: whose arrays the callables take, "torch" or "numpy".
        dtype: of the inputs: "float32", or of torch "bfloat16".
        elements_only: True if `quantize` rounds to elements without a scale.
        name: what the result calls the implementation.

    Returns:
        A row for each corner, with the section of the specification, the cases that deviate, those that are right under
        another scale than the rule's, the smallest failing input and allowed choices; `print` shows a table.

    Raises:
        MXError: for unknown arguments, and callables that raise or return something else for two rows of 32 values.

    Example:
        >>> import torch
        >>> from mx_conformance import check
        >>> def truncate(x):  # to powers of two and halves between: E2M1 by hand, without rounding
        ...     scale = torch.exp2(torch.floor(torch.log2(x.abs().amax(1, keepdim=True))) - 2).nan_to_num(1.0)
        ...     step = torch.exp2(torch.floor(torch.log2((x / scale).abs())).clamp(min=0) - 1)
        ...     return ((x / scale / step).trunc() * step).clamp(-6, 6) * scale
        >>> result = check(truncate, format="mxfp4", rounding="even", name="truncate")
        >>> result.conforms
        False
        >>> ties = next(row for row in result.rows if row.corner == "ties")
        >>> ties.section, ties.example
        ('5.3.3', '[4.0, 0.75]: 0.75 became 0.5, expected 1.0; it follows rounding toward_zero')
    """
    claim = parse_claim(format, scale_mode=scale_mode, rounding=rounding, packing=packing, full_range=full_range)
    if framework not in ("torch", "numpy"):
        raise MXError(f"framework={framework!r}: {nearest(framework, ('torch', 'numpy'))}")
    if dtype != "float32" and (framework, dtype) != ("torch", "bfloat16"):
        raise MXError(f"dtype={dtype!r} of {framework}: use float32, or of torch bfloat16")
    if not any(map(callable, (quantize, dequantize))):
        raise MXError("pass a callable as quantize, as dequantize or as both")
    examination = Examination(Subject(quantize, dequantize, framework, dtype), claim, elements_only)
    _try(examination.subject, claim)
    run_corners(examination)
    followed = examination.followed
    rule = examination.rule or claim.scale_mode or NONE_OF_THESE
    rule = "-" if elements_only or quantize is None else rule
    rounding = "-" if quantize is None else str(followed.rounding)
    title = name or getattr(quantize or dequantize, "__name__", "implementation")
    rows = tuple(examination.rows)
    return Conformance(title, f"mx{claim.element}", rule, rounding, rows, claim.scale_mode is not None)


def run_corners(examination: Examination) -> None:
    """Run every corner that an implementation has callables for."""
    examine = examination.subject
    if examine.quantize is not None:
        if not examination.elements_only:
            stored.decide_packing(examination)
        examination.decide()
        for corner in CORNERS:
            if corner.of_elements or not examination.elements_only:
                examination.run(corner)
        if not examination.elements_only:
            extremes.run(examination)
    stored.run(examination)


def _try(subject: Subject, claim: Claim) -> None:
    """Raise an `MXError` if a callable does not return what it must for two plain rows."""
    x = rows_of([(1.0, 0.5), (3.0, -2.0)])
    name, output = "quantize", None
    try:
        if subject.quantize is not None:
            output = subject.run(x, claim)
        if subject.dequantize is not None:
            name = "dequantize"
            if output is None or output.data is None or output.scale is None:
                data, scale = stored.encoded(np.zeros((2, 32), np.uint8), claim), np.full((2, 1), 127, np.uint8)
            else:
                data, scale = output.data, output.scale
            subject.decode(data, scale, 32)
    except MXError:
        raise
    except Exception as error:
        given = (
            f"{subject.dtype} values of shape (2, 32)" if name == "quantize" else "the codes and scales of two blocks"
        )
        raise MXError(f"{name} raised {type(error).__name__} for {given} ({subject.framework}): {error}") from error
