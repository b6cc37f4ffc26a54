"""Time a package beside its program in float: the same graph without quantization, compiled in the same way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import Hadamard, is_ours
from pt2mx.fx.graph.qdq import is_portable
from pt2mx.fx.graph.tensors import (
    cast_floats,
    copy_sharing_tensors,
    floats_in,
    move_to_device,
    without_torch_warnings,
)
from pt2mx.fx.passes.undo_quantization import undo_quantization
from pt2mx.pt2e.program.sizes import dynamic_shapes
from pt2mx.pt2e.report.speed import FLOATS, Speed, SpeedTest


def speed_beside_float(
    name: str,
    call: Callable[[], object],
    program: ExportedProgram | None,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    device: torch.device | str,
) -> Speed:
    """Time a call in turns with a program in float32 and in bfloat16.

    Args:
        name, call: the row of the call, and what to time.
        program: the program of the call, quantized or in float, which is compiled for its dynamic shapes; None to time
            the call alone.
        inputs: the positional and the keyword arguments of the call.
        device: where the call runs.
    """
    test = SpeedTest(device)
    test.add(name, lambda: call)
    with TemporaryDirectory() as folder:
        if program is not None:
            for dtype in FLOATS:
                test.add(dtype, partial(_compiled, program, inputs, getattr(torch, dtype), device, folder))
        return test.run()


def _compiled(
    program: ExportedProgram,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    dtype: torch.dtype,
    device: torch.device | str,
    folder: str,
) -> Callable[[], object]:
    """Return a call of a program in a float dtype, compiled by AOTInductor."""
    shapes = dynamic_shapes(program, program.module())
    graph = cast_floats(move_to_device(float_graph(program), device), dtype)
    args, kwargs = floats_in(dtype, inputs)
    path = str(Path(folder) / f"{str(dtype).removeprefix('torch.')}.pt2")
    with without_torch_warnings():
        exported = torch.export.export(graph, args, kwargs, dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(exported, package_path=path)
    model = torch._inductor.aoti_load_package(path)
    return lambda: model(*args, **kwargs)


def float_graph(program: ExportedProgram) -> GraphModule:
    """Return the graph of a program without quantization and rotations, to measure its time.

    Its weights have the values of the codes, also those of rotated ones, so that its outputs are not the float model's.

    Raises:
        MXError: for a program that still calls an operator of pt2mx, such as one over a quantized cache, and for a
            portable one.
    """
    graph = copy_sharing_tensors(program.module())
    if is_portable(graph):
        raise MXError("a portable program does not tell what is quantized: give the one that it was made from")
    undo_quantization(graph)
    for inner in graph_modules(graph):
        for node, call in list(Hadamard.calls_in(inner.graph)):
            node.replace_all_uses_with(call.x)
            inner.graph.erase_node(node)
        if left := next(filter(is_ours, inner.graph.nodes), None):
            raise MXError(f"the program computes with codes: it calls {left.target}")
        inner.recompile()
    return graph
