"""`pt2mx compile` of the folder of a language model: packages for prompts and for single tokens."""

from __future__ import annotations

import argparse

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.user_errors import user_errors

#: by which packages are compared with the program: a batch of two texts
_TOKENS = 32


def compile_folder(options: argparse.Namespace) -> Result:
    """The command `pt2mx compile` for a language model."""
    given = {"--output": options.output, "--portable": options.portable, "--unpack": options.unpack}
    for name, value in given.items():
        if value:
            raise MXError(f"{name} is not for a language model: its packages are written to {options.program!r}")
    with Progress(3) as progress:
        with user_errors(f"load {options.program!r}"):
            model = LanguageModel.from_pretrained(options.program, options.device)
        progress.begin("compile")
        with user_errors("compile the model"):
            paths = model.write_packages(options.program)
        progress.begin("compare")
        with user_errors("run the packages"):
            same = _agrees(model, LanguageModel.from_pretrained(options.program, options.device))
    sizes = {str(path): path.stat().st_size for path in paths}
    text = [
        f"compiled against eager: {same} of {_TOKENS} tokens are the same",
        *(f"{path}: {size / 1e6:.1f} MB" for path, size in sizes.items()),
        progress.seconds(),
    ]
    data = {"packages": sizes, "tokens": _TOKENS, "same_tokens": same, "seconds": progress.times()}
    return Result("\n".join(text), data)


def _agrees(model: LanguageModel, compiled: LanguageModel) -> int:
    """Count the tokens for which both find the same most likely one."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (2, _TOKENS // 2), generator=torch.Generator().manual_seed(0)).to(model.device)
    with torch.no_grad():
        return int((model(ids).logits.argmax(-1) == compiled(ids).logits.argmax(-1)).sum())
