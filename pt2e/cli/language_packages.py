"""`pt2mx compile` of the folder of a language model: packages for prompts and for single tokens."""

from __future__ import annotations

import argparse
import time

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.stage import Stages, user_errors
from pt2mx.pt2e.language.language_model import LanguageModel


def compile_folder(options: argparse.Namespace) -> None:
    """The command `pt2mx compile` for a language model."""
    given = {"--output": options.output, "--portable": options.portable, "--unpack": options.unpack}
    for name, value in given.items():
        if value:
            raise MXError(f"{name} is not for a language model: its packages are written to {options.program!r}")
    with Stages(3) as progress:
        with user_errors(f"load {options.program!r}"):
            model = LanguageModel.from_pretrained(options.program, options.device)
        progress.begin("compile")
        begin = time.perf_counter()
        with user_errors("compile the model"):
            paths = model.write_packages(options.program)
        seconds = time.perf_counter() - begin
        progress.begin("compare")
        with user_errors("run the packages"):
            same = _agrees(model, LanguageModel.from_pretrained(options.program, options.device))
        progress.update()
    print(f"compiled against eager: {same} of 32 tokens are the same")
    print(", ".join(f"{path}: {path.stat().st_size / 1e6:.1f} MB" for path in paths) + f", {seconds:.0f} s")


def _agrees(model: LanguageModel, compiled: LanguageModel) -> int:
    """Count the tokens for which both find the same most likely one."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (2, 16), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.no_grad():
        return int((model(ids).logits.argmax(-1) == compiled(ids).logits.argmax(-1)).sum())
