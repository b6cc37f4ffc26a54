"""The float models of the checkpoints, tiny ones with random weights and SmolLM2, and the texts to score."""

import shutil
from pathlib import Path

import torch

from pt2mx.pt2e.models.gguf_model import gguf_in
from pt2mx.pt2e.models.gguf_tensors import load_float_gguf
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from tests.language_models import tiny_decoder, tokenizer_of_bytes, transformers

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 256}
_WINDOWS = {"intermediate_size": 256, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
#: name -> the family of `tests.language_models` and its sizes
TINY = {
    "llama": ("llama", _SIZES),
    "tied": ("llama", {**_SIZES, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", _SIZES),
    "mixtral": ("mixtral", {**_SIZES, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {**_SIZES, **_EXPERTS}),
    "gpt_oss": ("gpt_oss", {**_SIZES, **_WINDOWS, "num_experts_per_tok": 2}),
}
SMOLLM2 = "smollm2"
_TEXTS, _LENGTH = 8, 64


def write_float_model(name: str, folder: Path, gguf: Path | None) -> None:
    """Write a float checkpoint in bfloat16, unless the folder is there. SmolLM2 is made of a GGUF file."""
    if folder.exists():
        return
    temporary = folder.with_suffix(".part")
    shutil.rmtree(temporary, ignore_errors=True)
    if name == SMOLLM2:
        file = gguf_in(gguf)
        load_float_gguf(file, torch.float32).bfloat16().save_pretrained(temporary)
        load_tokenizer(file).save_pretrained(temporary)
    else:
        family, sizes = TINY[name]
        _randomized(tiny_decoder(family, **sizes)).bfloat16().save_pretrained(temporary)
        tokenizer_of_bytes().save_pretrained(temporary)
    temporary.rename(folder)


@torch.no_grad()
def _randomized(model):
    """Return a model with weights of a size that makes its tokens differ in probability; biases and norms vary, too."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() > 1:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)
    return model


def texts_of(name: str, folder: Path) -> list[list[int]]:
    """Return the texts to score, in tokens: random ones, for SmolLM2 the beginning of the project's README."""
    if name == SMOLLM2:
        readme = Path(__file__).parents[3] / "README.md"
        tokens = transformers.AutoTokenizer.from_pretrained(folder)(readme.read_text(encoding="utf-8")).input_ids
        return [tokens[i * _LENGTH : (i + 1) * _LENGTH] for i in range(_TEXTS)]
    return torch.randint(256, (_TEXTS, _LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
