"""Accuracy at 4 bits on pretrained weights: rounded to nearest, and by the presets of `pt2mx.optimize`.

    python -m tests.benchmarks.accuracy [--sentences 1024] [--json]

all-MiniLM-L6-v2, every linear layer, attention and embedding quantized; calibrated on sentences of the docstrings of
Python's standard library. Mean and worst cosine to the float embeddings of the 72 sentences that pt2mx ships, which are
of another kind, and of 256 docstrings that calibration did not see; seconds of `optimize`, and the most memory so far.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import resource
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim
from torch.fx import GraphModule
from torch.nn.functional import cosine_similarity

import pt2mx
from pt2mx import MXQuantizer, MXSpec, get_default_mx_quantization_config
from pt2mx.pt2e.cli.models import load_minilm
from pt2mx.pt2e.cli.sentences import sentences
from tests.benchmarks.measure import Row, hardware, print_table

#: scale modes of FP4: `even` loses less than `floor`, which saturates up to a quarter of a block's largest value
FP4 = MXSpec("mxfp4", scale_mode="even")
FORMATS = {
    "W4": (FP4, None),
    "W4A8": (FP4, "mxfp8"),
    "W4A4": (FP4, FP4),
    "W4A4, attention FP8": (FP4, FP4),
}
HEADER = ("format", "rounding", "72", "worst", "docstrings", "worst of them", "seconds", "peak MB")
HELD_OUT = 256


def docstrings() -> list[str]:
    """The sentences of the standard library's docstrings, each once, in an order that is always the same."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                found.update(dict.fromkeys(s for s in re.split(r"(?<=[.!?])\s+", text) if 20 < len(s) < 200))
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    listed = list(found)
    return [listed[i] for i in order]


def quantizer(name: str) -> MXQuantizer:
    weight, activation = FORMATS[name]
    chosen = MXQuantizer().set_global(get_default_mx_quantization_config(weight=weight, activation=activation))
    if name.endswith("FP8"):
        fp8 = get_default_mx_quantization_config(weight="mxfp8", activation="mxfp8")
        chosen.set_operator_type("aten.scaled_dot_product_attention", fp8)
    return chosen


def minilm(calibration: int) -> tuple[GraphModule, list[tuple[Tensor, ...]], list[tuple[Tensor, ...]]]:
    """The exported encoder, its calibration batches, and the inputs of the two test sets."""
    encoder, tokenize = load_minilm()
    dims = {0: Dim("batch"), 1: Dim("sequence", max=512)}
    shapes = dict.fromkeys(("input_ids", "attention_mask"), dims)
    exported = torch.export.export(encoder, tokenize(sentences()[:2]), dynamic_shapes=shapes).module()
    texts = docstrings()[: calibration + HELD_OUT]
    seen = sorted(texts[:calibration], key=len)  # those of one length together: little padding
    batches = [tokenize(seen[i : i + 32]) for i in range(0, len(seen), 32)]
    return exported, batches, [tokenize(sentences()), tokenize(texts[calibration:])]


def rows(calibration: int) -> list[Row]:
    exported, batches, tests = minilm(calibration)
    with torch.no_grad():
        wanted = [exported(*inputs) for inputs in tests]
    found: list[Row] = []
    for name in FORMATS:
        chosen = quantizer(name)
        ways: dict[str, Callable[[], GraphModule]] = {
            "nearest": lambda: exported,
            "fast": lambda chosen=chosen: pt2mx.optimize(exported, chosen, preset="fast"),
            "balanced": lambda chosen=chosen: pt2mx.optimize(exported, chosen, batches),
        }
        for way, make in ways.items():
            begin = time.perf_counter()
            model = make()
            seconds = time.perf_counter() - begin
            converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, chosen))
            with torch.no_grad():
                cosines = [cosine_similarity(converted(*x), y) for x, y in zip(tests, wanted, strict=True)]
            figures = [f"{value:.4f}" for cosine in cosines for value in (cosine.mean(), cosine.min())]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            cells = (name, way, *figures, f"{seconds:.1f}" if way != "nearest" else "", peak)
            found.append(dict(zip(HEADER, cells, strict=True)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=1024, help="of calibration; default: 1024")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = rows(options.sentences)
    if options.json:
        print(json.dumps({"hardware": hardware(), "rows": found}, indent=1))
    else:
        print_table(found, HEADER)
        print(hardware())


if __name__ == "__main__":
    main()
