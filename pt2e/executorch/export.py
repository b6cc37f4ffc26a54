"""`export_executorch`: write a converted program as a file that ExecuTorch runs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from pt2mx.errors import MXError, nearest
from pt2mx.extras import import_extra, without_log_warnings
from pt2mx.pt2e.executorch.edge import BESIDE_CORE, edge_ready
from pt2mx.pt2e.files.output import check_output, whole_file
from pt2mx.pt2e.files.user_errors import quiet_export, user_errors

#: `backend` -> the partitioners of the parts of a graph that the backend runs: module, class
BACKENDS: dict[str, tuple[tuple[str, str], ...]] = {
    "portable": (),
    "xnnpack": (("executorch.backends.xnnpack.partition.xnnpack_partitioner", "XnnpackPartitioner"),),
}


@dataclass(frozen=True)
class ExecutorchFile:
    """A file that `export_executorch` wrote.

    Args:
        size: bytes of the file.
        operators: the operators that the file calls outside of the backends, as `aten::mm.out`, sorted.
        backends: the names of the backends to which parts of the graph were delegated, one for each part.
    """

    size: int
    operators: tuple[str, ...]
    backends: tuple[str, ...]


def export_executorch(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    *,
    backend: str = "portable",
    partitioners: Sequence[Any] | None = None,
    max_size: int | None = None,
) -> ExecutorchFile:
    """Write a converted program as an ExecuTorch file.

    The file holds codes and scales of weights as bytes, and its graph decodes them at each call. It calls ExecuTorch's
    portable kernels alone, so that a runtime needs nothing of pt2mx. Quantized tensors have the bits of the program;
    matmuls may sum in another order. Needs the extra `executorch`.

    Args:
        program: `torch.export.export(converted, ...)`; it does not change.
        path: the path of the file; by custom its name ends in .pte. The file replaces it when it is complete.
        backend: "portable", or "xnnpack" to delegate what XNNPACK takes to it.
        partitioners: partitioners of ExecuTorch, for another backend than those; None takes those of `backend`.
        max_size: the largest size of each dynamic dimension that has no upper bound. ExecuTorch plans memory for it.

    Returns:
        The size of the file, the operators that it calls, and the backends that it delegates to.

    Raises:
        MXError: for another object, an unknown backend, operators for which ExecuTorch has no kernel, a dynamic
            dimension without an upper bound, a missing package, and a path at which no file can be written.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> quantizer = pt2mx.MXQuantizer.from_recipe("mxfp4")
        >>> converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))
        >>> program = torch.export.export(converted, (x,))
        >>> file = pt2mx.export_executorch(program, "net.pte")  # doctest: +SKIP
        >>> "aten::linear.out" in file.operators  # doctest: +SKIP
        True
    """
    if backend not in BACKENDS:
        raise MXError(f"unknown backend {backend!r}: {nearest(backend, BACKENDS)}")
    check_output(path)
    exir = import_executorch("executorch.exir")
    chosen = partitioners_of(backend) if partitioners is None else partitioners
    ready = edge_ready(program, max_size)
    _check_bounds(ready)
    config = exir.EdgeCompileConfig(_core_aten_ops_exception_list=list(BESIDE_CORE), _check_ir_validity=False)
    with warnings.catch_warnings(), without_log_warnings(), quiet_export(), torch.no_grad():
        warnings.simplefilter("ignore")  # executorch warns of its own code
        with user_errors("lower the program to ExecuTorch"):
            edge = exir.to_edge_transform_and_lower(ready, partitioner=list(chosen), compile_config=config)
            lowered = edge.to_executorch()
    (plan,) = lowered.executorch_program.execution_plan
    operators = sorted(f"{op.name}.{op.overload}" if op.overload else op.name for op in plan.operators)
    _check_kernels(operators)
    with whole_file(path) as file:
        lowered.write_to_file(file)
    return ExecutorchFile(os.path.getsize(path), tuple(operators), tuple(d.id for d in plan.delegates))


def import_executorch(module: str) -> Any:
    """Import a module of executorch.

    Raises:
        MXError: where it is not installed, with the command that installs it.
    """
    import_extra("executorch", "executorch")
    with user_errors(f"import {module}", "`pt2mx doctor` lists what is missing"), without_log_warnings():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)


def partitioners_of(backend: str) -> list[Any]:
    """Return the partitioners of a backend."""
    return [getattr(import_executorch(module), name)() for module, name in BACKENDS[backend]]


def _check_bounds(program: ExportedProgram) -> None:
    """Raise an MXError for a dynamic dimension without an upper bound, because ExecuTorch plans memory for it."""
    for symbol, bounds in program.range_constraints.items():
        if not bounds.upper.is_Integer:
            raise MXError(
                f"the dynamic dimension {symbol} has no upper bound, and ExecuTorch plans memory before it runs: pass "
                'max_size= (--max-size), or export with torch.export.Dim("batch", max=64) or the like'
            )


def _check_kernels(operators: list[str]) -> None:
    """Raise an MXError for operators without a kernel in the runtime that is installed."""
    runtime = import_executorch("executorch.runtime").Runtime.get()
    missing = sorted({*operators} - {*runtime.operator_registry.operator_names})
    if missing:
        raise MXError(
            f"ExecuTorch's kernels lack {', '.join(missing)}: the file would not load. Linear layers, convolutions, "
            "matmuls, attention, embeddings, norms and elementwise functions work; replace the others in the model, "
            "or pass the partitioners of a backend that has them"
        )
