"""The second half of `make demo`: a real language model in 4 bits, from its checkpoint to text."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from pt2mx.pt2e.cli.language import calibration, load_decoder
from pt2mx.pt2e.cli.smollm2 import smollm2_checkpoint
from pt2mx.pt2e.language.folder import load_tokenizer
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.quantize import quantize_language_model
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

RECIPE = "mxfp4_decoder"
_PROMPTS = ("The capital of France is", "Water boils at a temperature of", "Once upon a time, there was a")
_TOKENS = 24


def main(recipe: str = RECIPE) -> None:
    """Quantize SmolLM2-135M, save it, load it, and print what it writes.

    Args:
        recipe: the name of a shipped recipe.
    """
    checkpoint = smollm2_checkpoint()
    model, tokenizer = load_decoder(str(checkpoint)), load_tokenizer(checkpoint)
    quantizer = MXQuantizer.from_recipe(recipe)
    begin = time.perf_counter()
    quantized = quantize_language_model(model, quantizer, calibration(None, tokenizer, quantizer), tokenizer)
    seconds = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        quantized.save_pretrained(folder, quantizer)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        float_size = sum(parameter.nbytes for parameter in model.parameters())
        print(f"\nSmolLM2-135M-Instruct by {recipe}: {float_size / 1e6:.0f} -> {size / 1e6:.0f} MB in {seconds:.0f} s")
        loaded = LanguageModel.from_pretrained(folder)
        begin = time.perf_counter()
        for prompt in _PROMPTS:
            text = loaded.generate(text=prompt, max_new_tokens=_TOKENS, do_sample=False)
            print(f"  {prompt}{text}".replace("\n", " "))
        rate = _TOKENS * len(_PROMPTS) / (time.perf_counter() - begin)
        print(f"about {rate:.0f} tokens a second, not compiled; `pt2mx compile FOLDER` makes packages of machine code")
