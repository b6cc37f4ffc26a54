"""The second half of `pt2mx demo`: a real language model in 4 bits, from its checkpoint to text."""

from __future__ import annotations

import os
import time
from pathlib import Path

from pt2mx.pt2e.cli.language import calibration, load_decoder
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.smollm2 import smollm2_checkpoint
from pt2mx.pt2e.cli.summary import bytes_of
from pt2mx.pt2e.language.folder import load_tokenizer
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.quantize import quantize_language_model
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

RECIPE = "mxfp4_decoder"
#: of the model's folder
NAME = "smollm2"
_PROMPTS = ("The capital of France is", "Water boils at a temperature of", "Once upon a time, there was a")
_TOKENS = 24


def main(folder: str | os.PathLike[str], recipe: str = RECIPE) -> dict[str, object]:
    """Quantize SmolLM2-135M, save it, load it, and print what it writes.

    Args:
        folder: in which the folder of the quantized model is made.
        recipe: the name of a shipped recipe.

    Returns:
        The numbers that are printed, by name, and the texts.
    """
    place = Path(folder) / NAME
    quantizer = MXQuantizer.from_recipe(recipe)
    stages = Progress(6 + (quantizer.algorithms is not None), "load SmolLM2")
    checkpoint = smollm2_checkpoint()
    model, tokenizer = load_decoder(str(checkpoint)), load_tokenizer(checkpoint)
    begin = time.perf_counter()
    texts = calibration(None, tokenizer, quantizer)
    quantized = quantize_language_model(model, quantizer, texts, tokenizer, stages.begin)
    seconds = time.perf_counter() - begin
    stages.begin("save")
    quantized.save_pretrained(place, quantizer)
    stages.begin("generate")
    loaded = LanguageModel.from_pretrained(place)
    begin = time.perf_counter()
    written = {prompt: loaded.generate(text=prompt, max_new_tokens=_TOKENS, do_sample=False) for prompt in _PROMPTS}
    rate = _TOKENS * len(_PROMPTS) / (time.perf_counter() - begin)
    size, float_size = bytes_of(place), sum(parameter.nbytes for parameter in model.parameters())
    print(f"\nSmolLM2-135M-Instruct by {recipe}: {float_size / 1e6:.0f} -> {size / 1e6:.0f} MB in {seconds:.0f} s")
    for prompt, text in written.items():
        print(f"  {prompt}{text}".replace("\n", " "))
    print(f"about {rate:.0f} tokens a second, not compiled; `pt2mx compile {place}` makes packages of machine code")
    return {"folder": str(place), "bytes": size, "float_bytes": float_size, "tokens_per_second": rate, "texts": written}
