"""The command `pt2mx`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from pt2mx.compare import print_mx_format_table
from pt2mx.errors import MXError
from pt2mx.pt2e import recipe
from pt2mx.pt2e.agreement import agreement
from pt2mx.pt2e.compile import add_commands
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.models import call, export, load_batches, load_model
from pt2mx.pt2e.output import check_output
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.quantizer import MXQuantizer
from pt2mx.pt2e.report import quantization_report
from pt2mx.pt2e.stage import progress_bar, stage, step


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, or 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except MXError as error:
        print(f"pt2mx: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pt2mx", description="Quantize PyTorch models to the OCP MX formats.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    quantize = commands.add_parser("quantize", help="export, calibrate, convert and save a model")
    quantize.add_argument(
        "--model", required=True, help="minilm, torchvision:NAME, hf:DIRECTORY_OR_NAME, or module.py:factory"
    )
    quantize.add_argument("--recipe", required=True, help=f"a YAML file, or one of {', '.join(recipe.names())}")
    quantize.add_argument("--calibration", help="folder of .pt/.npz batches; by default the model's built-in sample")
    quantize.add_argument("--output", default="out.pt2", help="the exported program to write (default: out.pt2)")
    quantize.add_argument("--compile", action="store_true", help="also compile the result and compare it with eager")
    quantize.add_argument("--report", help="file to write the report to: HTML if its name ends in .html, else JSON")
    quantize.set_defaults(run=_quantize)
    add_commands(commands)
    formats = commands.add_parser("formats", help="print the table of element formats")
    formats.set_defaults(run=_formats)
    return parser


def _quantize(options: argparse.Namespace) -> None:
    quantizer = MXQuantizer.from_recipe(options.recipe)  # a typo in it should not cost the loading of a model
    for path in (options.output, options.report):
        if path is not None:
            check_output(path)
    with progress_bar(5) as progress:
        with stage("load the model"):
            loaded = load_model(options.model)
        batches = loaded.batches
        if options.calibration:
            batches = [loaded.conform(batch) for batch in load_batches(options.calibration)]

        step(progress, "export")
        with stage("export the model"):
            float_model = loaded.export().module()
        prepared = prepare_pt2e(float_model, quantizer)
        if not any(operator.quantized for operator in quantization_report(prepared).operators):
            raise MXError(f"the recipe {options.recipe!r} selects no operator of the model: nothing would be quantized")

        step(progress, "calibrate")
        with torch.no_grad(), stage("run a calibration batch through the model"):
            for batch in tqdm(batches, desc="batches", leave=False, disable=None, file=sys.stderr):
                call(prepared, batch)

        step(progress, "convert")
        converted = convert_pt2e(prepared)

        step(progress, "save")
        with stage("export the converted model"):
            program = export(converted, loaded.example, loaded.dynamic_shapes)
        with stage(f"write {options.output!r}"):
            torch.export.save(program, options.output)
        progress.update()
    report = quantization_report(converted)
    if options.report:
        with stage(f"write {options.report!r}"):
            (report.to_html if options.report.endswith(".html") else report.to_json)(options.report)
    print(report.to_table())
    if options.compile:
        compiled = torch.compile(converted)
        with torch.no_grad():
            difference, cosine = agreement((call(compiled, batch), call(converted, batch)) for batch in batches[:1])
        print(f"compiled against eager: SQNR {difference:.1f} dB, cosine {cosine:.6f}")
    with torch.no_grad():
        sqnr, cosine = agreement((call(converted, batch), call(float_model, batch)) for batch in batches)
    size = Path(options.output).stat().st_size
    print(f"output against the float model: SQNR {sqnr:.1f} dB, cosine {cosine:.6f}")
    print(f"{options.output}: {size / 1e6:.1f} MB, {report.effective_bits:.2f} bits a value")


def _formats(options: argparse.Namespace) -> None:
    print_mx_format_table()


if __name__ == "__main__":
    sys.exit(main())
