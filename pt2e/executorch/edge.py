"""Programs for ExecuTorch: core aten operators, packed weights as bytes, and no bit casts. Needs no executorch."""

from __future__ import annotations

import copy

import torch
from torch.export import ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from pt2mx.errors import check_integer
from pt2mx.fx.portable import without_bit_casts
from pt2mx.fx.share_tables import share_tables
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.program.export_again import check_converted, export_again

aten = torch.ops.aten
#: operators that ExecuTorch's kernels have, although they are not core aten operators
BESIDE_CORE = (
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
)


def edge_ready(program: ExportedProgram, max_size: int | None = None) -> ExportedProgram:
    """Return a program of core aten operators that gives the bits of a converted one.

    Weights are bytes, as they were packed; the graph decodes them. Embeddings decode only the rows that they look up.

    Args:
        program: `torch.export.export(converted, ...)`; it does not change.
        max_size: the upper bound of dynamic dimensions that have none; None leaves them without.

    Raises:
        MXError: for another object, for a program without quantized tensors, and for another `max_size`.
    """
    check_converted(program)
    if max_size is not None:
        program = _bounded(program, max_size)
    with user_errors("export the program again"):
        return share_tables(without_bit_casts(export_again(program)))


def _bounded(program: ExportedProgram, max_size: int) -> ExportedProgram:
    """Return the program with an upper bound for each of its dynamic dimensions; its graph is shared."""
    check_integer("max_size", max_size, 2)
    bounded = copy.copy(program)
    bounded._range_constraints = {
        symbol: bounds if bounds.upper.is_Integer else ValueRanges(bounds.lower, max_size)
        for symbol, bounds in program.range_constraints.items()
    }
    return bounded
