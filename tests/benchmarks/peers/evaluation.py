"""Write the job of a model, and evaluate what a method wrote."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pt2mx
from tests.benchmarks.accuracy.case import config
from tests.benchmarks.peers.figures import Scores
from tests.benchmarks.peers.models import Model
from tests.benchmarks.peers.process import (
    CALIBRATION,
    CHECKPOINT,
    EVALUATED,
    IN_FLOAT,
    OUTPUT,
    ROTATION,
    inputs_file,
    save_checkpoint,
)

Outputs = Mapping[str, Iterable[Tensor]]


class Evaluation:
    """The float model, and the inputs for validation and the test on which methods are compared with it.

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
        names = CALIBRATION, *EVALUATED
        if not all(inputs_file(kept, name).exists() for name in names):
            kept.mkdir(parents=True, exist_ok=True)
            for name, inputs in zip(names, model.inputs(tokenizer), strict=True):
                save_file({"inputs": inputs}, inputs_file(kept, name))
        for name in names:
            inputs_file(folder, name).symlink_to(inputs_file(kept, name).absolute())
        self.net.to(device)
        self.windows = {name: load_file(inputs_file(folder, name), device)["inputs"].split(1) for name in EVALUATED}
        self.forward = model.wrap(self.net)
        with torch.no_grad():
            self.references = {name: [*map(self.forward, windows)] for name, windows in self.windows.items()}

    def of_float(self) -> dict[str, Scores]:
        """Return the scores of the float model, for validation and the test."""
        return self._scores(self.references)

    @torch.no_grad()
    def of_result(self, file: Path, name: str) -> dict[str, Scores]:
        """Return the scores of outputs, or of dequantized weights with the activation quantizer of this project.

        The quantizer rounds the inputs of a linear layer after the rotation, if the result has one.

        Args:
            file: what the process of a method wrote.
            name: the format.

        Raises:
            ValueError: for weights that are not MXFP4.
            RuntimeError: for weights that do not fit the model.
        """
        result = load_file(file, str(self.windows["test"][0].device))
        if OUTPUT.format(name, "test", 0) in result:
            return self._scores(
                {
                    part: [result[OUTPUT.format(name, part, i)] for i in range(len(windows))]
                    for part, windows in self.windows.items()
                }
            )
        original = {key: tensor.clone() for key, tensor in self.net.state_dict().items()}
        chosen = config(name, "even")
        hooks = []
        linears = {path: module for path, module in self.net.named_modules() if isinstance(module, nn.Linear)}
        rotations = {path: result.pop(ROTATION.format(path), None) for path in linears}
        try:
            self.net.load_state_dict(result)
            for path, linear in linears.items():
                rounded = not path.endswith(IN_FLOAT)
                if rounded:
                    _check_grid(path, linear.weight, chosen.weight)
                hook = _before(rotations[path], chosen.activation if rounded else None)
                hooks.append(linear.register_forward_pre_hook(hook))
            return self._scores({part: map(self.forward, windows) for part, windows in self.windows.items()})
        finally:
            for hook in hooks:
                hook.remove()
            self.net.load_state_dict(original)

    def _scores(self, outputs: Outputs) -> dict[str, Scores]:
        return {
            part: self.model.metric.scores(outputs[part], windows, self.references[part])
            for part, windows in self.windows.items()
        }


def _check_grid(name: str, weight: Tensor, spec: pt2mx.MXSpec) -> None:
    changed = float((pt2mx.fake_quantize_mx(weight, spec) != weight).float().mean())
    if changed:
        raise ValueError(f"{changed:.2%} of the values of {name} are not {spec.element.name}")


def _before(rotation: Tensor | None, spec: pt2mx.MXSpec | None) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
    """Return a hook that rotates and rounds the inputs of a linear layer; None leaves that out."""

    def hook(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        rotated = inputs[0] if rotation is None else inputs[0] @ rotation
        return rotated if spec is None else pt2mx.fake_quantize_mx(rotated, spec)

    return hook
