"""The compiled program of `pt2mx demo`: another process compiles it while models are quantized."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from pt2mx.analysis.tables import ratio_text
from pt2mx.pt2e.cli.progress import stage_line
from pt2mx.pt2e.models.packaged import load_minilm
from pt2mx.pt2e.models.samples import sentences
from pt2mx.pt2e.packages.package import load_package
from pt2mx.pt2e.program.program import load_program

_RUNS = 5


class Compilation:
    """A process that compiles the program of a recipe in a folder, which also has `float.pt2` and gets the package."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self._folder, self._recipe = folder, recipe
        self._package = folder / f"{recipe}.aoti.pt2"

    def begin(self, recipe: str) -> None:
        """Start the process if this is the recipe whose program was saved."""
        if recipe != self._recipe:
            return
        program = str(self._folder / f"{recipe}.pt2")
        command = [sys.executable, "-m", "pt2mx", "compile", program, "--output", str(self._package)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8")

    def finish(self) -> dict[str, float] | None:
        """Wait for the package; print and return its cosine to the program's embeddings, and how much faster it is than
        the float program. None where the program cannot be compiled, for example without a compiler: it prints why."""
        stage_line(f"compile {self._recipe}, begun when it was saved")
        _, errors = self._process.communicate()
        if self._process.returncode:
            print(f"\n{self._recipe} was not compiled: {(errors.strip().splitlines() or ['no reason'])[-1]}")
            return None
        _, tokenize = load_minilm()
        inputs = tokenize(sentences())
        names = (self._recipe, "float")
        quantized_model, float_model = (load_program(self._folder / f"{name}.pt2").module() for name in names)
        compiled, seconds = _timed(load_package(self._package), inputs)
        quantized, _ = _timed(quantized_model, inputs)
        _, float_seconds = _timed(float_model, inputs)
        cosine, faster = cosine_similarity(compiled, quantized).mean().item(), float_seconds / seconds
        speed = ratio_text(faster, "faster than", "slower than", "about as fast as")
        print(f"\n{self._recipe} compiled: cosine {cosine:.6f} to the program, {speed} the float program")
        return {"cosine": cosine, "faster": faster}


@torch.no_grad()
def _timed(model: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """Return the output and the least seconds of some runs."""
    seconds = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        output = model(*inputs)
        seconds.append(time.perf_counter() - begin)
    return output, min(seconds)
