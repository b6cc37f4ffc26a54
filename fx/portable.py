"""Programs for processes in which pt2mx is not installed."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from pt2mx import ops
from pt2mx.decompositions import decompositions, product_decompositions
from pt2mx.errors import MXError
from pt2mx.kernels.philox import random_bits


def make_portable(program: ExportedProgram) -> ExportedProgram:
    """The program with pt2mx's operators written out in aten operators: it loads where only torch is installed, and
    gives the same bits in eager mode.

    Args:
        program: `torch.export.export(converted, ...)`; it stays as it is.

    Raises:
        MXError: for another object.
    """
    return _decompose(program, {**decompositions(random_bits), **_CALLS})


def without_calls(program: ExportedProgram) -> ExportedProgram:
    """The program with those of pt2mx's operators written out that Inductor would call, for a package that runs where
    only torch is installed. The others it writes out itself, in a form that it compiles right.

    Raises:
        MXError: for another object.
    """
    return _decompose(program, _CALLS)


#: what Inductor keeps as calls: products that read packed weights, and the numbers of stochastic rounding
_CALLS = {**product_decompositions(), ops.random_bits: random_bits}


def _decompose(program: ExportedProgram, table: dict) -> ExportedProgram:
    if not isinstance(program, ExportedProgram):
        raise MXError(
            f"expected an ExportedProgram, not {type(program).__name__}: pass torch.export.export(converted, inputs)"
        )
    with torch.no_grad():
        return program.run_decompositions(table)
