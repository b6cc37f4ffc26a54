"""The command `pt2mx slice`: re-quantize a program, or a language model, to a narrower recipe without data."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from pt2mx.pt2e.cli import report_file
from pt2mx.pt2e.cli.option_checks import check_program_file, check_program_name
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result, quantized_result
from pt2mx.pt2e.files.output import check_distinct, check_output
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.optimize.slice import slice_program
from pt2mx.pt2e.program.program import read_program, save_program
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import quantization_report


def run(options: argparse.Namespace) -> Result:
    quantizer = MXQuantizer.from_recipe(options.recipe)  # a typo in it should not cost the loading of a model
    if options.report is not None:
        check_output(options.report, suffixes=report_file.SUFFIXES)
    recipe_file = options.recipe if Path(options.recipe).is_file() else None
    check_distinct({"--output": options.output, "--report": options.report}, {"--recipe": recipe_file})
    if Path(options.program).is_dir():
        language = importlib.import_module("pt2mx.pt2e.cli.slice_language")  # imports transformers
        return language.slice_folder(options, quantizer)
    check_program_name(options.output)
    check_program_file(options)
    with Progress(3) as progress:
        with user_errors(f"load {options.program!r}"):
            program = read_program(options.program)

        progress.begin("slice")
        with user_errors("slice the program"):
            sliced = slice_program(program, quantizer)

        progress.begin("save")
        with user_errors(f"write {options.output!r}"):
            save_program(sliced, options.output, quantizer)
        report = quantization_report(sliced.module(check_guards=False))
        if options.report is not None:
            report_file.write_report(report, options.report, model=options.program, recipe=options.recipe)
    return quantized_result(report, options, progress)
