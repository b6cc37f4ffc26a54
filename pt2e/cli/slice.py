"""The command `pt2mx slice`: re-quantize a program, or a language model, to a narrower recipe without data."""

from __future__ import annotations

import argparse
from pathlib import Path

from pt2mx.pt2e.cli.card import describe_output
from pt2mx.pt2e.cli.programs import load_folder, load_program_file
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result, quantized_result, write_report
from pt2mx.pt2e.files.card_metadata import REPORT, copy_files
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.optimize.slice import slice_program
from pt2mx.pt2e.program.program import save_program
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import QuantizationReport, quantization_report


def run(options: argparse.Namespace) -> Result:
    quantizer = MXQuantizer.from_recipe(options.recipe)  # a typo in it should not cost the loading of a model
    slice_ = _slice_folder if Path(options.program).is_dir() else _slice_file
    with Progress(3) as progress:
        report = slice_(options, quantizer, progress)
        if options.report is not None:
            write_report(report, options.report, model=options.program, recipe=options.recipe)
    return quantized_result(report, options, progress)


def _slice_file(options: argparse.Namespace, quantizer: MXQuantizer, progress: Progress) -> QuantizationReport:
    program = load_program_file(options.program)
    progress.begin("slice")
    with user_errors("slice the program"):
        sliced = slice_program(program, quantizer)
    progress.begin("save")
    with user_errors(f"write {options.output!r}"):
        save_program(sliced, options.output, quantizer)
    return quantization_report(sliced.module(check_guards=False))


def _slice_folder(options: argparse.Namespace, quantizer: MXQuantizer, progress: Progress) -> QuantizationReport:
    from pt2mx.pt2e.language.slice import slice_language_model  # they import transformers
    from pt2mx.pt2e.models.tokenizers import PROCESSOR

    model = load_folder(options.program)
    progress.begin("slice")
    with user_errors("slice the model"):
        sliced = slice_language_model(model, quantizer)
    report = quantization_report(sliced)
    progress.begin("save")
    with user_errors(f"write {options.output!r}"):
        sliced.save_pretrained(options.output, quantizer)
        copy_files(options.program, options.output, PROCESSOR, replace=False)  # a model does not load all of it
        report.to_json(Path(options.output) / REPORT)
        describe_output(options, options.program)
    return report
