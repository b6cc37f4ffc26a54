"""The second half of `pt2mx demo`: quantize SmolLM2-135M-Instruct to 8 bits, and generate text."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import size_of
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.quantize import quantize_language_model
from pt2mx.pt2e.models.packaged import smollm2_checkpoint
from pt2mx.pt2e.models.pretrained import load_language_model
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

RECIPE = "decoder_best"
#: the name of the model's folder
NAME = "smollm2"
_PROMPTS = ("The capital of France is", "The chemical formula of water is")
_TOKENS = 12


def main(folder: str | os.PathLike[str], recipe: str = RECIPE) -> dict[str, object]:
    """Quantize SmolLM2-135M, rounded to nearest, save it into a folder there, load it, and print what it generates."""
    target = Path(folder) / NAME
    # algorithms take most of a minute: the demo rounds to nearest
    quantizer = MXQuantizer.from_recipe(recipe).set_algorithms(None)
    progress = Progress(6, "load SmolLM2")
    checkpoint = smollm2_checkpoint()
    model, tokenizer = load_language_model(str(checkpoint)), load_tokenizer(checkpoint)
    begin = time.perf_counter()
    quantized = quantize_language_model(model, quantizer, [], tokenizer, progress.begin)
    seconds = time.perf_counter() - begin
    progress.begin("save")
    quantized.save_pretrained(target, quantizer)
    progress.begin("generate")
    loaded = LanguageModel.from_pretrained(target)
    options: dict[str, Any] = {"max_new_tokens": _TOKENS, "do_sample": False}
    texts, float_texts = {}, {}
    for prompt in _PROMPTS:
        texts[prompt] = loaded.generate(text=prompt, **options)
        tokens = loaded.tokens([prompt])
        new = model.generate(**tokens, **options)[0, tokens["input_ids"].shape[1] :]
        float_texts[prompt] = loaded.tokenizer.decode(new, skip_special_tokens=True)
    size, float_size = size_of(target), sum(parameter.nbytes for parameter in model.parameters())
    print(f"\nSmolLM2-135M-Instruct by {recipe}: {float_size / 1e6:.0f} -> {size / 1e6:.0f} MB in {seconds:.0f} s")
    for prompt, text in texts.items():
        print(f"  {prompt}{text}".replace("\n", " "))
        print(f"    in float: {float_texts[prompt].strip()}".replace("\n", " "))
    sizes = {"bytes": size, "float_bytes": float_size}
    return {"folder": str(target), **sizes, "texts": texts, "float_texts": float_texts}
