"""SmolLM2-135M-Instruct: write the job of a method, and evaluate what the method wrote.

The decoder's linear layers are quantized; head, embedding and attention matmuls stay in float. Calibrated on docstrings
of sympy and scipy, evaluated on docstrings of networkx, scikit-learn and numpy.
"""

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
from tests.benchmarks.accuracy.smollm2 import load
from tests.benchmarks.accuracy.texts import package_text
from tests.benchmarks.peers.figures import Figures, figures
from tests.benchmarks.peers.process import CALIBRATION, CHECKPOINT

WINDOW = 256
#: windows of calibration and of held-out text
SEEN, HELD_OUT = 32, 16


class Evaluation:
    """The float model, and the held-out text on which methods are compared with it.

    Args:
        folder: the folder of the jobs, which gets the checkpoint and the calibration tokens.
        layers: the number of layers to keep; None: all.
    """

    def __init__(self, folder: Path, layers: int | None) -> None:
        decoder, tokenizer = load()
        self.model = _untied(decoder, layers)
        self.model.save_pretrained(folder / CHECKPOINT)
        tokenizer.save_pretrained(folder / CHECKPOINT)
        save_file({"input_ids": _tokens(tokenizer, ("sympy", "scipy"), SEEN)}, folder / CALIBRATION)
        self.windows = _tokens(tokenizer, ("networkx", "sklearn", "numpy"), HELD_OUT).split(1)
        with torch.no_grad():
            self.references = [self._predict(window) for window in self.windows]

    def _predict(self, window: Tensor) -> Tensor:
        return self.model(input_ids=window, use_cache=False).logits

    def of_float(self) -> Figures:
        """Return the figures of the float model."""
        return figures(self._predict, self.windows, self.references)

    def of_program(self, file: Path) -> Figures:
        """Return the figures of a program of this project."""
        return figures(load_program(file).module(), self.windows, self.references)

    def of_weights(self, file: Path, name: str) -> Figures:
        """Return the figures of dequantized weights, with the activation quantizer of this project.

        Raises:
            ValueError: for weights that are not MXFP4.
        """
        original = {key: tensor.clone() for key, tensor in self.model.state_dict().items()}
        chosen = config(name, "even")
        hooks = []
        try:
            self.model.load_state_dict(load_file(file))
            for path, linear in _linears(self.model):
                _check_grid(path, linear.weight, chosen.weight)
                if chosen.activation is not None:
                    hooks.append(linear.register_forward_pre_hook(_rounding(chosen.activation)))
            return figures(self._predict, self.windows, self.references)
        finally:
            for hook in hooks:
                hook.remove()
            self.model.load_state_dict(original)


def _untied(decoder: nn.Module, layers: int | None) -> nn.Module:
    """Return the decoder with its first layers and a head of its own: methods may rotate the embedding."""
    kept = decoder.config.num_hidden_layers if layers is None else layers
    config = type(decoder.config).from_dict(
        {**decoder.config.to_dict(), "num_hidden_layers": kept, "tie_word_embeddings": False}
    )
    model = type(decoder)(config).eval()
    weights = {**decoder.state_dict(), "lm_head.weight": decoder.get_input_embeddings().weight}
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def _tokens(tokenizer: Any, packages: tuple[str, ...], windows: int) -> Tensor:
    """Return (windows, WINDOW) int64 tokens of docstrings."""
    ids = tokenizer(package_text(packages, 8 * windows * WINDOW), verbose=False)["input_ids"]
    return torch.tensor(ids[: windows * WINDOW]).view(windows, WINDOW)


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]


def _check_grid(name: str, weight: Tensor, spec: pt2mx.MXSpec) -> None:
    changed = float((pt2mx.fake_quantize_mx(weight, spec) != weight).float().mean())
    if changed:
        raise ValueError(f"{changed:.2%} of the values of {name} are not {spec.element.name}")


def _rounding(spec: pt2mx.MXSpec) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
    return lambda module, inputs: pt2mx.fake_quantize_mx(inputs[0], spec)
