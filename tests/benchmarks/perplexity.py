"""SmolLM2-135M-Instruct by recipes, with and without algorithms, and with quantized caches.

    python -m tests.benchmarks.perplexity [--tokens 4096] [--only mxfp8 ...]

The decoder's layers, head and embedding are quantized, as by `pt2mx quantize`. Perplexity on docstrings of Python's
standard library in blocks of 512, calibrated on 8,192 tokens of other docstrings; the divergence from the float model's
next-token distribution, and how often both have the same most likely token. `cpu_decode.py` measures speed.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from pt2mx import MXQuantizer, quantize_language_model
from pt2mx.pt2e.language.texts import BLOCK, blocks, perplexity
from pt2mx.pt2e.quantizer import recipe
from tests.benchmarks.accuracy.smollm2 import load
from tests.benchmarks.accuracy.texts import sentences
from tests.benchmarks.measure import Row, report

_SEEN = 8192
#: formats of the cache; the weights are as in `mxfp4_decoder`
_CACHES = ("none", "mxint8", "mxfp8", "mxfp8(even)", "mxfp6", "mxfp4(even)")


def cases() -> dict[str, MXQuantizer]:
    """Return the quantizers by the name of their row."""
    quantizers = {name: MXQuantizer.from_recipe(name).set_algorithms(None) for name in recipe.names()}
    for name in recipe.names():
        quantizers[f"{name}, balanced"] = MXQuantizer.from_recipe(name).set_algorithms("balanced")
    for cache in _CACHES:
        quantizer = MXQuantizer.from_recipe("mxfp4_decoder")
        quantizers[f"mxfp4_decoder, cache {cache}"] = quantizer.set_kv_cache(None if cache == "none" else cache)
    return quantizers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", nargs="+", help="rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load()
    text = " ".join(sentences())
    every = blocks(text, tokenizer, _SEEN + options.tokens)
    seen, held_out = every[: _SEEN // BLOCK], every[_SEEN // BLOCK :]
    rows: list[Row] = []

    def exact(block: Tensor) -> Tensor:
        return model(input_ids=block, use_cache=False).logits

    def add(name: str, run: Any, reference: Any, seconds: float) -> None:
        result = perplexity(lambda block: run(input_ids=block).logits, held_out, reference)
        row: Row = {"": name, "perplexity": f"{result.perplexity:.2f}", "seconds": f"{seconds:.0f}"}
        if result.divergence is not None and result.agreement is not None:
            row |= {"KL": f"{result.divergence:.4f}", "same": f"{result.agreement:.1%}"}
        rows.append(row)
        print(row, flush=True)

    if not options.only:
        add("float32", model, None, 0)
        add("bfloat16", model.to(torch.bfloat16), None, 0)
        model.to(torch.float32)
    for name, quantizer in cases().items():
        if options.only and name not in options.only:
            continue
        begin = time.perf_counter()
        quantized = quantize_language_model(model, quantizer, seen, tokenizer)
        add(name, quantized, exact, time.perf_counter() - begin)
    report(rows, ("", "perplexity", "KL", "same", "seconds"))


if __name__ == "__main__":
    main()
