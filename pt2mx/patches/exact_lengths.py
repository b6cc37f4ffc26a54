"""Make AOTInductor compute the lengths behind its inputs' sizes by integers.

Where a size is 49 times a length, torch (2.13) writes `int64_t length = (1.0/49.0)*size;`, which is one too small for
most lengths: the package loses a row. A torch whose `try_solve` divides integers needs no patch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import sympy
from torch.utils._sympy import solve as torch_solve
from torch.utils._sympy.functions import FloorDiv

from pt2mx.patches.replaced import replaced


def exact_lengths() -> AbstractContextManager[None]:
    """Divide integers in the code that is generated within the context."""
    # inside the context these would import the replacement
    import torch._inductor.codegen.wrapper_fxir
    import torch._inductor.tiling_utils  # noqa: F401

    return replaced(torch_solve, "try_solve", _by_integers)


def _by_integers(solve_by_fractions: Callable[..., Any]) -> Callable[..., Any]:
    def solve(equation: Any, symbol: sympy.Symbol, *args: Any, **kwargs: Any) -> Any:
        solution = solve_by_fractions(equation, symbol, *args, **kwargs)
        if solution is None:
            return None
        relation, length = solution
        numerator, denominator = sympy.fraction(sympy.together(length))
        if denominator.is_Integer and denominator != 1:
            return relation, FloorDiv(numerator, denominator)
        return relation, length

    return solve
