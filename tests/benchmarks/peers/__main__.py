"""Accuracy at 4 bits by this project and by its peers: the same model, calibration and held-out text.

    python -m tests.benchmarks.peers [--model smollm2|minilm] [--layers 4] [--methods balanced AutoRound ...]
        [--formats W4 W4A4] [--iterations 200]

Each method runs in a process of its own, the peers in environments in `build/peers/` that the first run makes with pip.
A peer writes dequantized weights. They are evaluated with the activation quantizer of this project. W4: MXFP4 weights;
W4A8, W4A4: with MXFP8 or MXFP4 activations; the peers learn W4A8 as W4. The seconds are processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.measure import hardware, print_table
from tests.benchmarks.peers.evaluation import Evaluation
from tests.benchmarks.peers.figures import Cells
from tests.benchmarks.peers.models import MODELS
from tests.environments import environment

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "peers"
#: method -> its module, and the requirement of its environment; None: the environment of this process
METHODS: dict[str, tuple[str, str | None]] = {
    "nearest": ("ours", None),
    "fast": ("ours", None),
    "imatrix": ("ours", None),
    "balanced": ("ours", None),
    "best": ("ours", None),
    "torchao": ("torchao_mx", None),
    "AutoRound": ("auto_round", "auto-round==0.16.1"),
    "GPTQ": ("llm_compressor", "llmcompressor==0.14.0.1"),
    "SmoothQuant + GPTQ": ("llm_compressor", "llmcompressor==0.14.0.1"),
    "SpinQuant + GPTQ": ("llm_compressor", "llmcompressor==0.14.0.1"),
    "NNCF": ("nncf_weights", "nncf==3.4.0"),
    "ModelOpt": ("model_opt", "nvidia-modelopt==0.47.0"),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--layers", type=int, metavar="N", help="keep the first N layers of the model")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--formats", nargs="+", choices=("W4", "W4A8", "W4A4"), default=["W4", "W4A4"])
    parser.add_argument("--iterations", type=int, default=200, metavar="N", help="steps of AutoRound for each layer")
    options = parser.parse_args(arguments)
    model = MODELS[options.model]
    with tempfile.TemporaryDirectory() as folder:
        evaluation = Evaluation(Path(folder), model, options.layers)
        rows, errors = [{"format": "float", "method": "", **evaluation.of_float()}], []
        for name in options.formats:
            for method in options.methods:
                job = {"auto": model.auto, "model_name": options.model, "method": method, "format": name}
                try:
                    cells = _measured(evaluation, Path(folder), {**job, "iterations": options.iterations})
                    rows.append({"format": name, "method": method, **cells})
                    print(rows[-1], file=sys.stderr)
                except MethodError as error:
                    errors.append(f"{name}, {method}: {error}")
    print_table(rows, list(dict.fromkeys(key for row in rows for key in row)))
    print("", *errors, sep="\n")
    text = f"{model.seen} windows of {model.length} tokens seen, {model.held_out} held out"
    print(f"{options.layers or 'all'} layers, {text}; {hardware()}")


class MethodError(Exception):
    """A method that cannot run, or whose weights are not MXFP4."""


def _measured(evaluation: Evaluation, folder: Path, options: dict[str, Any]) -> Cells:
    """Return the figures of a method, and what it cost.

    Raises:
        MethodError: with the last line that the method printed.
    """
    module, requirement = METHODS[options["method"]]
    job = folder / f"{options['method']}-{options['format']}.json"
    job.write_text(json.dumps(options))
    command = [str(_python(requirement)), "-m", f"tests.benchmarks.peers.{module}", str(job)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise MethodError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    cost = {name: f"{value:.0f}" for name, value in json.loads(job.with_suffix(".cost").read_text()).items()}
    if (program := job.with_suffix(".pt2")).exists():
        return {**evaluation.of_program(program), **cost}
    try:
        return {**evaluation.of_weights(job.with_suffix(".safetensors"), options["format"]), **cost}
    except (ValueError, RuntimeError) as error:
        raise MethodError(str(error)) from error


def _python(requirement: str | None) -> Path:
    """Return the interpreter of an environment in `build/peers/`, which the first call makes."""
    if requirement is None:
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


if __name__ == "__main__":
    main()
