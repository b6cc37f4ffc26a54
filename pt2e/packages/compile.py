"""Compile an exported program to a package of machine code."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.fx.graph.tensors import copy_sharing_tensors, move_to_device, without_torch_warnings
from pt2mx.fx.lower import lower_to_inductor
from pt2mx.fx.portable import without_calls
from pt2mx.pt2e.packages.package import check_package_output, write_package
from pt2mx.pt2e.packages.pytree_args import in_memory_order, memory_order
from pt2mx.pt2e.program.provenance import Provenance
from pt2mx.pt2e.program.sizes import dynamic_shapes, ranges
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer


def compile_program(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    device: str = "cpu",
    portable: bool = False,
    unpack: bool = False,
    recipe: MXQuantizer | str | None = None,
) -> None:
    """Lower a converted program and compile it with AOTInductor into the package `path`.

    The package takes the shapes that the program takes. Operations that both compute in the same way give equal bits:
    quantization, and matmuls in an eager kernel. Where Inductor computes in another way or order (sums, `exp`, `tanh`),
    the last bits differ, and a later quantization may round to the next value.

    Args:
        program: `torch.export.export(converted, ...)`, with its example inputs; it is not changed.
        path: the package to write, a name that ends in `.pt2`.
        device: "cpu" or "cuda", where the package runs.
        portable: write pt2mx's operators out, so that the package runs in a process without pt2mx. A weight is then
            dequantized at each call. Otherwise a process imports pt2mx before it loads the package.
        unpack: keep weights dequantized in the package, as `lower_to_inductor` does; otherwise they stay packed.
        recipe: the quantizer, or its YAML, to put into the package (`provenance_of`).
    """
    check_package_output(path)
    provenance = Provenance.here(recipe)
    if program.example_inputs is None:
        raise MXError("the program holds no example inputs: export it again and save it whole")
    eager = program.module()
    shapes = dynamic_shapes(program, eager)
    lowered = lower_to_inductor(eager, device, unpack=unpack)
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda t: in_memory_order(t, memory_order(t)).to(device), program.example_inputs
    )
    with torch.no_grad(), without_torch_warnings():
        exported = torch.export.export(lowered, args, kwargs, dynamic_shapes=shapes)
        code = without_calls(exported) if portable else exported
        write_package(code, exported, lowered, path, device, ranges(program), _on_the_cpu(eager), provenance)


def _on_the_cpu(model: GraphModule) -> Callable[..., object]:
    """Return a function that runs the model on the CPU, for inputs on any device, and writes to none of its buffers.

    On the CPU an index out of range raises an error; on a GPU it ends the process.
    """
    cpu = torch.device("cpu")
    model = move_to_device(copy_sharing_tensors(model), cpu)

    def call(*args: object, **kwargs: object) -> object:
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.to(cpu), (args, kwargs))
        return model(*args, **kwargs)

    return call
