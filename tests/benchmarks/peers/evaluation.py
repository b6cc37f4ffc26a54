"""Write the job of a model, and evaluate what a method wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pt2mx
from pt2mx.pt2e.program import load_program
from tests.benchmarks.accuracy.case import config
from tests.benchmarks.accuracy.texts import package_text
from tests.benchmarks.peers.figures import Cells, Forward
from tests.benchmarks.peers.models import IN_FLOAT, Model
from tests.benchmarks.peers.process import CALIBRATION, CHECKPOINT


class Evaluation:
    """The float model, and the held-out text on which methods are compared with it.

    Args:
        folder: the folder of the jobs, which gets the checkpoint and the calibration tokens.
        model: what to compare on.
        layers: the number of layers to keep; None: all.
    """

    def __init__(self, folder: Path, model: Model, layers: int | None) -> None:
        self.model = model
        self.net, tokenizer = model.load(layers)
        self.net.save_pretrained(folder / CHECKPOINT)
        tokenizer.save_pretrained(folder / CHECKPOINT)
        seen = _tokens(tokenizer, ("sympy", "scipy"), model.seen, model.length)
        save_file({"input_ids": seen}, folder / CALIBRATION)
        self.windows = _tokens(tokenizer, ("networkx", "sklearn", "numpy"), model.held_out, model.length).split(1)
        self.forward = model.wrap(self.net)
        with torch.no_grad():
            self.references = [self.forward(window) for window in self.windows]

    def of_float(self) -> Cells:
        """Return the figures of the float model."""
        return self._figures(self.forward)

    def of_program(self, file: Path) -> Cells:
        """Return the figures of a program of this project."""
        return self._figures(load_program(file).module())

    def of_weights(self, file: Path, name: str) -> Cells:
        """Return the figures of dequantized weights, with the activation quantizer of this project.

        Raises:
            ValueError: for weights that are not MXFP4.
        """
        original = {key: tensor.clone() for key, tensor in self.net.state_dict().items()}
        chosen = config(name, "even")
        hooks = []
        try:
            self.net.load_state_dict(load_file(file))
            for path, linear in self.net.named_modules():
                if isinstance(linear, nn.Linear) and not path.endswith(IN_FLOAT):
                    _check_grid(path, linear.weight, chosen.weight)
                    if chosen.activation is not None:
                        hooks.append(linear.register_forward_pre_hook(_rounding(chosen.activation)))
            return self._figures(self.forward)
        finally:
            for hook in hooks:
                hook.remove()
            self.net.load_state_dict(original)

    def _figures(self, forward: Forward) -> Cells:
        return self.model.figures(forward, self.windows, self.references)


def _tokens(tokenizer: Any, packages: tuple[str, ...], windows: int, length: int) -> Tensor:
    """Return the tokens of docstrings, (windows, length) int64."""
    ids = tokenizer(package_text(packages, 8 * windows * length), verbose=False)["input_ids"]
    return torch.tensor(ids[: windows * length]).view(windows, length)


def _check_grid(name: str, weight: Tensor, spec: pt2mx.MXSpec) -> None:
    changed = float((pt2mx.fake_quantize_mx(weight, spec) != weight).float().mean())
    if changed:
        raise ValueError(f"{changed:.2%} of the values of {name} are not {spec.element.name}")


def _rounding(spec: pt2mx.MXSpec) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
    return lambda module, inputs: pt2mx.fake_quantize_mx(inputs[0], spec)
