"""How far a reader follows a call through the package: the files that it enters, and how often it changes the file.

    python -m tests.benchmarks.walk [--recipe mxfp8]

Counted for a Linear from `prepare_pt2e` to an eager call, for `quantize_language_model` of a Llama of two layers, and
for a token of its eager `generate`. Calls of other packages count as calls from the file before them. Each call runs
once before it is counted. `--recipe` is that of the Llama.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import pt2mx
from tests.benchmarks.measure import Row, print_table
from tests.language_models import tiny_decoder

#: the folder of pt2mx/, fx/ and pt2e/
_ROOT = str(Path(os.path.realpath(pt2mx.__file__)).parents[1])
#: tokens of the longer text, and of the shorter one
_TOKENS = 24, 8


class Walk(AbstractContextManager["Walk"]):
    """The files of the package that are entered within the context, by functions called in this thread."""

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()  #: file -> how often a call came from another one
        self._paths: dict[str, str | None] = {}
        self._file: str | None = None

    @property
    def changes(self) -> int:
        return sum(self.entered.values())

    def __enter__(self) -> Walk:
        sys.setprofile(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code.co_name == "<module>":
            return
        name = frame.f_code.co_filename
        if name not in self._paths:
            self._paths[name] = _path_in_package(name)
        file = self._paths[name]
        if file is None or file == self._file:
            return
        self.entered[file] += 1
        self._file = file


def _path_in_package(name: str) -> str | None:
    """Return the path of a file of the package; None for another file."""
    path = os.path.realpath(name)
    is_ours = path.startswith((f"{_ROOT}/pt2mx/", f"{_ROOT}/fx/", f"{_ROOT}/pt2e/")) and os.path.isfile(path)
    return os.path.relpath(path, _ROOT) if is_ours else None


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(x))


def flow() -> None:
    """Quantize a Linear, and call the lowered model."""
    x = torch.randn(8, 64)
    exported = torch.export.export(Linear().eval(), (x,)).module()
    config = pt2mx.get_default_mx_quantization_config(weight="mxfp4", activation="mxfp8")
    prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer().set_global(config))
    with torch.no_grad():
        prepared(x)
        pt2mx.lower_to_inductor(pt2mx.convert_pt2e(prepared))(x)


def walked(call: Callable[[], object]) -> Walk:
    """Call a function twice, and count the second time."""
    call()
    with Walk() as walk:
        call()
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mxfp4_weight_only", help="of the Llama; default: %(default)s")
    options = parser.parse_args()
    model, quantizer = tiny_decoder("llama"), pt2mx.MXQuantizer.from_recipe(options.recipe)
    quantized = pt2mx.quantize_language_model(model, quantizer)
    prompt = torch.tensor([[1, 2, 3]])

    def generate(tokens: int) -> Callable[[], object]:
        return lambda: quantized.generate(prompt, max_new_tokens=tokens, do_sample=False, eos_token_id=None)

    longer, shorter = (walked(generate(tokens)) for tokens in _TOKENS)
    calls = {
        "a Linear, prepare to eager call": walked(flow),
        "quantize_language_model": walked(lambda: pt2mx.quantize_language_model(model, quantizer)),
    }
    rows: list[Row] = [
        {"call": name, "files": len(walk.entered), "changes of file": walk.changes} for name, walk in calls.items()
    ]
    changes = (longer.changes - shorter.changes) / (_TOKENS[0] - _TOKENS[1])
    rows.append({"call": "a token of generate", "files": len(longer.entered), "changes of file": changes})
    print_table(rows, tuple(rows[0]))


if __name__ == "__main__":
    main()
