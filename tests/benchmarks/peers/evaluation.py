"""Write the job of a model, and evaluate what a method wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pt2mx
from tests.benchmarks.accuracy.case import config
from tests.benchmarks.peers.figures import Scores
from tests.benchmarks.peers.models import IN_FLOAT, Model
from tests.benchmarks.peers.process import CALIBRATION, CHECKPOINT, HELD_OUT, OUTPUT, save_checkpoint


class Evaluation:
    """The float model, and the held-out inputs on which methods are compared with it.

    Args:
        folder: the folder of the jobs, which gets the checkpoint and the inputs.
        model: what to compare on.
        layers: the number of layers to keep; None: all.
        kept: a folder that keeps the inputs, so that later runs use the same ones.
        device: where to evaluate.
    """

    def __init__(self, folder: Path, model: Model, layers: int | None, kept: Path, device: str = "cpu") -> None:
        self.model = model
        self.net, tokenizer = model.load(layers)
        save_checkpoint(folder / CHECKPOINT, self.net, tokenizer)
        if not (kept / HELD_OUT).exists():
            kept.mkdir(parents=True, exist_ok=True)
            for name, inputs in zip((CALIBRATION, HELD_OUT), model.inputs(tokenizer), strict=True):
                save_file({"inputs": inputs}, kept / name)
        for name in (CALIBRATION, HELD_OUT):
            (folder / name).symlink_to((kept / name).absolute())
        self.net.to(device)
        self.windows = load_file(folder / HELD_OUT, device)["inputs"].split(1)
        self.forward = model.wrap(self.net)
        with torch.no_grad():
            self.references = [self.forward(window) for window in self.windows]

    def of_float(self) -> Scores:
        """Return the scores of the float model."""
        return self._scores(self.references)

    @torch.no_grad()
    def of_result(self, file: Path, name: str) -> Scores:
        """Return the scores of outputs, or of dequantized weights with the activation quantizer of this project.

        Args:
            file: what the process of a method wrote.
            name: the format.

        Raises:
            ValueError: for weights that are not MXFP4.
            RuntimeError: for weights that do not fit the model.
        """
        result = load_file(file, str(self.windows[0].device))
        if OUTPUT.format(0) in result:
            return self._scores(result[OUTPUT.format(i)] for i in range(len(self.windows)))
        original = {key: tensor.clone() for key, tensor in self.net.state_dict().items()}
        chosen = config(name, "even")
        hooks = []
        try:
            self.net.load_state_dict(result)
            for path, linear in self.net.named_modules():
                if isinstance(linear, nn.Linear) and not path.endswith(IN_FLOAT):
                    _check_grid(path, linear.weight, chosen.weight)
                    if chosen.activation is not None:
                        hooks.append(linear.register_forward_pre_hook(_rounding(chosen.activation)))
            return self._scores(self.forward(window) for window in self.windows)
        finally:
            for hook in hooks:
                hook.remove()
            self.net.load_state_dict(original)

    def _scores(self, outputs: Iterable[Tensor]) -> Scores:
        return self.model.metric.scores(outputs, self.windows, self.references)


def _check_grid(name: str, weight: Tensor, spec: pt2mx.MXSpec) -> None:
    changed = float((pt2mx.fake_quantize_mx(weight, spec) != weight).float().mean())
    if changed:
        raise ValueError(f"{changed:.2%} of the values of {name} are not {spec.element.name}")


def _rounding(spec: pt2mx.MXSpec) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
    return lambda module, inputs: pt2mx.fake_quantize_mx(inputs[0], spec)
