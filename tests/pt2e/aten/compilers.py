"""Compilers that run lowered programs on this CPU, and models to run there."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from pt2mx.extras import import_extra
from pt2mx.pt2e.models.packaged import load_minilm

Call = Callable[..., Tensor]


def iree_module(program: ExportedProgram) -> bytes:
    """Return what IREE compiles of a program with weights in bytes."""
    import iree.turbine.aot as aot

    output = aot.export(program)
    output.session.set_flags("--iree-llvmcpu-target-cpu=host")
    return bytes(output.compile(save_to=None, target_backends=("llvm-cpu",)).map_memory())


def in_iree(program: ExportedProgram, driver: str = "local-task") -> Call:
    """Compile a program by IREE. The driver `local-sync` has one thread."""
    return loaded_in_iree(iree_module(program), driver)


def loaded_in_iree(binary: bytes, driver: str) -> Call:
    """Return a function that runs a compiled module, which may change its inputs."""
    from iree import runtime

    config = runtime.Config(driver)
    module = runtime.load_vm_module(runtime.VmModule.copy_buffer(config.vm_instance, binary), config)

    def call(*inputs: Tensor) -> Tensor:
        arrays = [runtime.asdevicearray(config.device, x.numpy()) for x in inputs]
        y = from_device(module.main(*arrays))
        for x, array in zip(inputs, arrays, strict=True):
            x.copy_(from_device(array))
        return y

    def from_device(array: Any) -> Tensor:
        return torch.from_numpy(np.array(array.to_host()))

    return call


def in_jax(program: ExportedProgram) -> Call:
    """Convert a program to StableHLO by torchax, for JAX."""
    import jax
    from torchax import export
    from torchax.ops import mappings

    e8m0 = {torch.float8_e8m0fnu: jax.numpy.float8_e8m0fnu}
    with jax.enable_x64(True), mock.patch.dict(mappings.NUMPY_UNSUPPORTED_DTYPES, e8m0):
        weights, exported = export.exported_program_to_stablehlo(program)

    def call(*inputs: Tensor) -> Tensor:
        with jax.enable_x64(True):
            (y,) = exported.call(weights, ([jax.numpy.asarray(x.numpy()) for x in inputs],))
        return torch.from_numpy(np.array(y))

    return call


class Compiler(NamedTuple):
    """A compiler: how it takes a program, the module that it needs, its extra, and the options of `lower_to_aten`."""

    compile: Callable[[ExportedProgram], Call]
    module: str
    extra: str
    options: dict[str, Any]


COMPILERS = {
    "IREE": Compiler(in_iree, "iree.turbine.aot", "iree", {"weights": "bytes"}),
    "JAX": Compiler(in_jax, "torchax.export", "stablehlo", {}),
}


def minilm() -> tuple[nn.Module, tuple[Tensor, ...]]:
    encoder, tokenize = load_minilm()
    return encoder, tokenize(["a cat sat on the mat", "blocks of numbers share a scale"])


def resnet18() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = import_extra("torchvision", "vision").models.resnet18(weights=None).eval()
    return model, (torch.randn(2, 3, 224, 224),)
