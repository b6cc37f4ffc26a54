"""`pt2mx quantize` of a checkpoint that is MX already: its codes and scales become a program as they are."""

from __future__ import annotations

import argparse
from pathlib import Path

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.load import is_mx_checkpoint, load_checkpoint
from pt2mx.pt2e.cli.checked_model import note_coverage
from pt2mx.pt2e.cli.output_names import check_folder_name
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.cli.summary import quantized
from pt2mx.pt2e.language.folder import REPORT
from pt2mx.pt2e.report.report import quantization_report
from pt2mx.pt2e.user_errors import user_errors


def is_for(options: argparse.Namespace) -> bool:
    """True where `--model` is such a checkpoint."""
    folder = options.model.removeprefix("hf:")
    return folder != options.model and is_mx_checkpoint(folder)


def load_to_folder(options: argparse.Namespace) -> Result:
    """The command for such a checkpoint."""
    name = options.model.removeprefix("hf:")
    _check(options)
    with Progress(3) as progress:
        with user_errors(f"load {name!r}"):
            partial = {"part": options.part, "allow_partial": options.allow_partial}
            found = load_checkpoint(name, options.device, progress.begin, **partial)
        note_coverage(found.coverage)
        if found.tokenizer is None:
            note(f"{name} holds no tokenizer: the result takes and gives tokens, no text")
        report = quantization_report(found.program.module())
        progress.begin("save")
        with user_errors(f"write {options.output!r}"):
            found.save_pretrained(options.output)
            report.to_json(options.report or Path(options.output) / REPORT)
    return quantized(report, options, progress, coverage=found.coverage)


#: options that say how to quantize -> their values that ask for nothing
_ASKING = {
    "recipe": (None,),
    "optimize": (None, "none"),
    "calibration": (None, "none"),
    "tensor_parallel": (1,),
    "compile": (False,),
    "dtype": (None,),
}


def _check(options: argparse.Namespace) -> None:
    for name, nothing in _ASKING.items():
        if getattr(options, name) not in nothing:
            raise MXError(
                f"{options.model!r} is quantized already, and taken as it is: leave --{name.replace('_', '-')} out, or "
                "give the float checkpoint"
            )
    if Path(options.output).suffix.lower() == ".pt2":
        raise MXError(f"{options.model!r} becomes a language model: give --output a folder, not {options.output!r}")
    check_folder_name(options.output, options.model.removeprefix("hf:"))
