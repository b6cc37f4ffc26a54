"""The command `pt2mx`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

from pt2mx.compare import print_mx_format_table
from pt2mx.errors import MXError
from pt2mx.pt2e import recipe
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.models import Batch, call, export, load_batches, load_model
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.quantizer import MXQuantizer
from pt2mx.pt2e.report import quantization_report
from pt2mx.statistics import sqnr_db


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
    formats = commands.add_parser("formats", help="print the table of element formats")
    formats.set_defaults(run=_formats)
    return parser


def _quantize(options: argparse.Namespace) -> None:
    quantizer = MXQuantizer.from_recipe(options.recipe)  # a typo in it should not cost the loading of a model
    for path in (options.output, options.report):
        if path is not None and (not Path(path).absolute().parent.is_dir() or Path(path).is_dir()):
            raise MXError(f"cannot write {path!r}: it must be a file in a folder that exists")
    with tqdm(total=5, desc="load", disable=None, file=sys.stderr) as progress:
        with _stage("load the model"):
            loaded = load_model(options.model)
        batches = loaded.batches
        if options.calibration:
            batches = [loaded.conform(batch) for batch in load_batches(options.calibration)]

        _step(progress, "export")
        with _stage("export the model"):
            float_model = loaded.export().module()
        prepared = prepare_pt2e(float_model, quantizer)
        if not any(operator.quantized for operator in quantization_report(prepared).operators):
            raise MXError(f"the recipe {options.recipe!r} selects no operator of the model: nothing would be quantized")

        _step(progress, "calibrate")
        with torch.no_grad(), _stage("run a calibration batch through the model"):
            for batch in tqdm(batches, desc="batches", leave=False, disable=None, file=sys.stderr):
                call(prepared, batch)

        _step(progress, "convert")
        converted = convert_pt2e(prepared)

        _step(progress, "save")
        with _stage("export the converted model"):
            program = export(converted, loaded.example, loaded.dynamic_shapes)
        with _stage(f"write {options.output!r}"):
            torch.export.save(program, options.output)
        progress.update()
    report = quantization_report(converted)
    if options.report:
        with _stage(f"write {options.report!r}"):
            (report.to_html if options.report.endswith(".html") else report.to_json)(options.report)
    print(report.to_table())
    if options.compile:
        difference, cosine = _compare(torch.compile(converted), converted, batches[:1])
        print(f"compiled against eager: SQNR {difference:.1f} dB, cosine {cosine:.6f}")
    sqnr, cosine = _compare(converted, float_model, batches)
    size = Path(options.output).stat().st_size
    print(f"output against the float model: SQNR {sqnr:.1f} dB, cosine {cosine:.6f}")
    print(f"{options.output}: {size / 1e6:.1f} MB, {report.effective_bits:.2f} bits a value")


@contextmanager
def _stage(what: str) -> Iterator[None]:
    """Code of others runs here (a factory, a model, export): what it raises becomes one line for the user."""
    try:
        yield
    except MXError:
        raise
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise MXError(f"could not {what}: {type(error).__name__}: {first}") from error


def _step(progress: tqdm, name: str) -> None:
    progress.update()
    progress.set_description(name)


def _compare(model: nn.Module, reference: nn.Module, batches: list[Batch]) -> tuple[float, float]:
    """SQNR in dB of model's outputs against the reference's over all batches, and the cosine between them."""
    signal = noise = product = energy = 0.0
    with torch.no_grad():
        for batch in batches:
            for got, want in zip(_outputs(model, batch), _outputs(reference, batch), strict=True):
                signal += want.square().sum().item()
                noise += (got - want).square().sum().item()
                product += (got * want).sum().item()
                energy += got.square().sum().item()
    scale = math.sqrt(signal * energy)
    return sqnr_db(signal, noise), product / scale if scale else float(signal == energy)


def _outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    leaves = pytree.tree_leaves(call(model, batch))
    return [leaf.double() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _formats(options: argparse.Namespace) -> None:
    print_mx_format_table()


if __name__ == "__main__":
    sys.exit(main())
