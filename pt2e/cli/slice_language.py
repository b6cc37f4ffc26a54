"""`pt2mx slice` of the folder of a language model."""

from __future__ import annotations

import argparse
from pathlib import Path

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.option_checks import check_folder_name
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.report_file import write_report
from pt2mx.pt2e.cli.result import Result, quantized_result
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.language.folder import REPORT, copy_processor
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.slice import slice_language_model
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import quantization_report


def slice_folder(options: argparse.Namespace, quantizer: MXQuantizer) -> Result:
    """Slice the language model in a folder, and write another folder."""
    if Path(options.output).suffix.lower() == ".pt2":
        raise MXError(f"{options.program!r} is a language model: give --output a folder, not {options.output!r}")
    check_folder_name(options.output, options.program)
    if Path(options.program).resolve() in Path(options.output).resolve().parents:
        raise MXError(f"--output {options.output!r} lies in {options.program!r}: give a folder outside of it")
    with Progress(3) as progress:
        with user_errors(f"load {options.program!r}"):
            model = LanguageModel.from_pretrained(options.program)

        progress.begin("slice")
        with user_errors("slice the model"):
            sliced = slice_language_model(model, quantizer)
        report = quantization_report(sliced)

        progress.begin("save")
        with user_errors(f"write {options.output!r}"):
            sliced.save_pretrained(options.output, quantizer)
            copy_processor(options.program, options.output)
            report.to_json(Path(options.output) / REPORT)
        if options.report is not None:
            write_report(report, options.report, model=options.program, recipe=options.recipe)
    return quantized_result(report, options, progress)
