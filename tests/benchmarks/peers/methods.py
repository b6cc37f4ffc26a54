"""The table of methods, their environments, and the process of a method."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pt2mx.algorithms.options import PRESETS
from tests.benchmarks.accuracy.case import OF_CHECKPOINTS, OF_PROGRAMS
from tests.benchmarks.peers import settings
from tests.environments import environment

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "peers"
DECODERS, IMAGES = ("smollm2", "smollm2-continued", "coder"), ("efficientnet-lite0", "efficientnet-lite1")
LANGUAGE = (*DECODERS, "minilm")


class Method(NamedTuple):
    """A tool that quantizes a model.

    Args:
        module: the module of this folder that runs it.
        settings: setting -> the options that the module reads.
        requirement: what pip installs for it, with blanks in between; None: it runs in the environment of the command.
        models: the models on which the command runs it.
        formats: the formats that it has; None: all formats.
        random: whether its results depend on the seed.
        together: the formats whose results one run makes; a run makes any other format alone.
    """

    module: str
    settings: Mapping[str, Any] = {"default": {}}
    requirement: str | None = None
    models: tuple[str, ...] = LANGUAGE
    formats: tuple[str, ...] | None = None
    random: bool = False
    together: tuple[str, ...] = ("W4", "W4A8")


_NNCF = "nncf==3.4.0"
#: the formats of 4-bit weights
FP4 = ("W4", "W4A8", "W4A4")
_ALL = LANGUAGE + IMAGES
_BREVITAS, _QUARK = "brevitas==0.13.4 datasets", "amd-quark==0.13"

METHODS = {
    "pt2mx": Method("ours", {name: {} for name in ("nearest", *PRESETS, *OF_PROGRAMS)}, models=_ALL, together=()),
    "pt2mx, checkpoints": Method("ours", {name: {} for name in OF_CHECKPOINTS}, models=DECODERS, together=()),
    "torchao": Method("torchao_mx", settings.TORCHAO, models=_ALL, formats=FP4),
    "llm-compressor": Method("llm_compressor", settings.LLM_COMPRESSOR, "llmcompressor==0.14.0.1", random=True),
    "AutoRound": Method("auto_round", settings.AUTO_ROUND, "auto-round==0.16.1", _ALL, FP4, random=True),
    "Brevitas": Method("brevitas", settings.BREVITAS, _BREVITAS, random=True),
    "Brevitas CNN": Method("brevitas_images", settings.BREVITAS_IMAGES, _BREVITAS, IMAGES, FP4, together=FP4),
    "Quark": Method("quark", settings.QUARK, _QUARK, random=True),
    "Quark ONNX": Method("quark_onnx", settings.QUARK_ONNX, _QUARK, IMAGES, FP4, together=()),
    "NNCF": Method("nncf_weights", settings.NNCF_WEIGHTS, _NNCF, _ALL, FP4),
    "ModelOpt": Method("model_opt", requirement="nvidia-modelopt==0.47.0"),
    "NNCF INT8": Method("nncf_int8", requirement=_NNCF, models=IMAGES, formats=("W8A8",)),
    "torchao INT8": Method("torchao_int8", models=IMAGES, formats=("W8A8",)),
}


class MethodError(Exception):
    """A method that cannot run, or whose weights are not MXFP4."""


def run_method(folder: Path, name: str, job: dict[str, Any]) -> tuple[Path, dict[str, float]]:
    """Run a method in a process of its own, and return the file that it wrote, and what it cost.

    Args:
        folder: the folder of the job, with the checkpoint and the inputs.
        name: the method.
        job: the options of `process.Job`, and `auto`.

    Raises:
        MethodError: with the error that the method printed.
    """
    method = METHODS[name]
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    command = [str(_python(method.requirement)), "-m", f"tests.benchmarks.peers.{method.module}", str(file)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise MethodError(_error(done.stderr) or f"exit status {done.returncode}")
    return file.with_suffix(".safetensors"), json.loads(file.with_suffix(".cost").read_text())


def _error(printed: str) -> str:
    """Return the error after the last traceback, or the last line, on one line."""
    *before, last = re.split(r"Traceback \(most recent call last\):\n(?: .*\n)+", printed.strip())
    return " ".join((last if before else last.rpartition("\n")[2]).split())[:400]


def _python(requirement: str | None) -> Path:
    """Return the interpreter that has a requirement: this one, or one in `build/peers/`, which the first call makes."""
    if requirement is None or _installed(requirement):
        return Path(sys.executable)
    folder = FOLDER / requirement.partition("==")[0]
    python = folder / "bin" / "python"
    if not python.exists():
        try:
            return environment(folder, f"torch=={torch.__version__.partition('+')[0]}", *requirement.split())
        except subprocess.CalledProcessError as error:
            shutil.rmtree(folder)
            raise MethodError(f"pip install {requirement} failed") from error
    return python


def _installed(requirement: str) -> bool:
    name, _, version = requirement.split()[0].partition("==")
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False
