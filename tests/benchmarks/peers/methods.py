"""The table of methods, their environments, and the process of a method."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.environments import environment

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "peers"
LANGUAGE, IMAGES = ("smollm2", "minilm"), ("efficientnet",)


class Method(NamedTuple):
    """A way to quantize a model.

    Args:
        module: the module of this folder that runs it.
        requirement: what pip installs for it; None: it runs in the environment of the command.
        models: the models on which the command runs it.
        formats: the formats that it has; None: all formats.
        iterations: the steps of a method that learns.
    """

    module: str
    requirement: str | None = None
    models: tuple[str, ...] = LANGUAGE
    formats: tuple[str, ...] | None = None
    iterations: int = 0


_AUTO_ROUND, _LLM_COMPRESSOR, _NNCF = "auto-round==0.16.1", "llmcompressor==0.14.0.1", "nncf==3.4.0"
_ALL = LANGUAGE + IMAGES
METHODS = {
    "nearest": Method("ours", models=_ALL),
    "fast": Method("ours"),
    "imatrix": Method("ours"),
    "balanced": Method("ours", models=_ALL),
    "best": Method("ours"),
    "unrotated": Method("ours"),
    "folded": Method("ours", models=("smollm2",)),
    "torchao": Method("torchao_mx", models=_ALL, formats=("W4", "W4A8", "W4A4")),
    "GPTQ": Method("llm_compressor", _LLM_COMPRESSOR),
    "SmoothQuant + GPTQ": Method("llm_compressor", _LLM_COMPRESSOR),
    "SpinQuant + GPTQ": Method("llm_compressor", _LLM_COMPRESSOR),
    "AutoRound": Method("auto_round", _AUTO_ROUND, _ALL, ("W4", "W4A8", "W4A4"), iterations=200),
    "AutoRound, 50 iterations": Method("auto_round", _AUTO_ROUND, iterations=50),
    "NNCF": Method("nncf_weights", _NNCF),
    "ModelOpt": Method("model_opt", "nvidia-modelopt==0.47.0"),
    "NNCF INT8": Method("nncf_int8", _NNCF, IMAGES, ("W8A8",)),
    "torchao INT8": Method("torchao_int8", None, IMAGES, ("W8A8",)),
}


class MethodError(Exception):
    """A method that cannot run, or whose weights are not MXFP4."""


def run_method(folder: Path, name: str, job: dict[str, Any]) -> tuple[Path, dict[str, float]]:
    """Run a method in a process of its own, and return the file that it wrote, and what it cost.

    Args:
        folder: the folder of the job, with the checkpoint and the inputs.
        name: the method.
        job: `auto`, `model_name`, `format` and `device`.

    Raises:
        MethodError: with the last line that the method printed.
    """
    method = METHODS[name]
    file = folder / "job.json"
    file.write_text(json.dumps({**job, "method": name, "iterations": method.iterations}))
    command = [str(_python(method.requirement)), "-m", f"tests.benchmarks.peers.{method.module}", str(file)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise MethodError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return file.with_suffix(".safetensors"), json.loads(file.with_suffix(".cost").read_text())


def _python(requirement: str | None) -> Path:
    """Return the interpreter that has a requirement: this one, or one in `build/peers/`, which the first call makes."""
    if requirement is None or _installed(requirement):
        return Path(sys.executable)
    folder = FOLDER / requirement.partition("==")[0]
    python = folder / "bin" / "python"
    if not python.exists():
        try:
            return environment(folder, f"torch=={torch.__version__.partition('+')[0]}", requirement)
        except subprocess.CalledProcessError as error:
            shutil.rmtree(folder)
            raise MethodError(f"pip install {requirement} failed") from error
    return python


def _installed(requirement: str) -> bool:
    name, _, version = requirement.partition("==")
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False
