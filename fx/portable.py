"""Programs for processes in which pt2mx is not installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.experimental import _config as config

from pt2mx import ops
from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import is_ours, specs_of
from pt2mx.fx.graph.qdq import PORTABLE, holds_observers
from pt2mx.fx.graph.tensors import without_torch_warnings
from pt2mx.fx.passes.accumulate import refuse_accumulators
from pt2mx.kernels import arithmetic, blocks_in_memory
from pt2mx.kernels.reference import random_bits
from pt2mx.ops.decompositions import call_decompositions, decompositions


def make_portable(program: ExportedProgram) -> ExportedProgram:
    """Decompose pt2mx's operators into aten operators.

    The program loads where only torch is installed. It gives the same bits in eager mode, and `torch.compile` compiles
    it as it is. It takes the shapes that `program` takes, by the same guards.

    Args:
        program: `torch.export.export(converted, ...)`; it does not change.

    Returns:
        The portable program.

    Raises:
        MXError: for an object that is no exported program, for an export of a prepared model, and for a registered
            element or scale mode, or an accumulator.

    Example:
        >>> import torch, pt2mx
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(64, 32)), torch.ones(2, 64)
        >>> exported = torch.export.export(model.eval(), (x,)).module()
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp8"))
        >>> y = prepared(x)
        >>> converted = pt2mx.convert_pt2e(prepared)
        >>> portable = pt2mx.make_portable(torch.export.export(converted, (x,)))
        >>> any("pt2mx" in str(node.target) for node in portable.graph.nodes)
        False
        >>> torch.equal(portable.module()(x), converted(x))
        True
    """
    portable = _decompose(program, {**decompositions(random_bits, lambda x: blocks_in_memory), **_CALLS})
    if any(is_ours(node) for graph in graph_modules(program.graph_module) for node in graph.graph.nodes):
        mark_portable(portable)
    return portable


def mark_portable(program: ExportedProgram) -> None:
    """Mark the nodes of a program whose operators are written out, so that nothing takes it for a float model."""
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = {**(node.meta.get("custom") or {}), **PORTABLE}


def without_calls(program: ExportedProgram) -> ExportedProgram:
    """Decompose the pt2mx operators that Inductor would call, for a package that runs where only torch is installed.

    Inductor decomposes the other operators itself, in a form that it compiles correctly.

    Raises:
        MXError: for another object.
    """
    return _decompose(program, _CALLS)


def without_bit_casts(
    program: ExportedProgram, others: Mapping[Any, Callable[..., Any]] | None = None
) -> ExportedProgram:
    """Decompose pt2mx's operators into aten operators that never read the bits of a float, for runtimes that cannot.

    The program gives the bits of `make_portable`. `others`: the decompositions of more operators.

    Raises:
        MXError: as `make_portable`.
    """
    table = decompositions(random_bits, lambda x: arithmetic, fake_quantize=arithmetic.fake_quantize)
    return _decompose(program, {**(others or {}), **table, **_CALLS, **_CORE})


aten = torch.ops.aten
#: operators that the decompositions use, and runtimes of core aten operators lack
_CORE: dict[Any, Callable[..., Any]] = {
    aten.view.dtype: arithmetic.view_dtype,
    aten.__lshift__.Scalar: aten.bitwise_left_shift.Tensor_Scalar,
    aten.__lshift__.Tensor: aten.bitwise_left_shift.Tensor,
    aten.__rshift__.Scalar: aten.bitwise_right_shift.Tensor_Scalar,
    aten.__rshift__.Tensor: aten.bitwise_right_shift.Tensor,
}


#: operators that Inductor calls: matmuls with packed weights, fused activation quantization, random numbers
_CALLS: dict[Any, Callable[..., Any]] = {**call_decompositions(), ops.random_bits: random_bits}


def _decompose(program: ExportedProgram, table: dict[Any, Callable[..., Any]]) -> ExportedProgram:
    if not isinstance(program, ExportedProgram):
        raise MXError(
            f"expected an ExportedProgram, not {type(program).__name__}: pass torch.export.export(converted, inputs)"
        )
    if holds_observers(program.state_dict):
        raise MXError("the program is an export of a prepared model: convert it (convert_pt2e), and export that")
    refuse_accumulators(program.graph_module, "programs of aten operators")
    for graph in graph_modules(program.graph_module):
        for node in filter(is_ours, graph.graph.nodes):
            for spec in specs_of(node):
                spec.check_built_in("programs of aten operators")
    # torch then asks the sizes of the example nothing: each answer would become a guard on the lengths of a call
    with (
        torch.no_grad(),
        config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]  # torch adds it as it runs
        without_torch_warnings(),
    ):
        return program.run_decompositions(table)
