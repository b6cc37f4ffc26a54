"""The command `pt2mx quantize`: export, calibrate, convert and save a model."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from tqdm import tqdm

from pt2mx.algorithms.options import PRESETS, look_at_inputs
from pt2mx.errors import MXError
from pt2mx.pt2e.cli.calibration import batch_files, load_batches
from pt2mx.pt2e.cli.devices import add_device, check_device
from pt2mx.pt2e.cli.models import Batch, LoadedModel, call, export, load_model, source_file
from pt2mx.pt2e.cli.stage import Stages, note, user_errors
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.optimize.calibrate import is_padding_mask
from pt2mx.pt2e.optimize.optimize import optimize
from pt2mx.pt2e.optimize.report import optimization_report
from pt2mx.pt2e.output import check_distinct, check_output
from pt2mx.pt2e.prepare import prepare_pt2e
from pt2mx.pt2e.program import save_program
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.fidelity import Fidelity, fidelity
from pt2mx.pt2e.report.finite import listed, nonfinite_operands, nonfinite_parameters
from pt2mx.pt2e.report.report import QuantizationReport, quantization_report

#: end of the name of a report -> the method that writes it
_REPORTS = {
    ".json": QuantizationReport.to_json,
    ".html": QuantizationReport.to_html,
    ".htm": QuantizationReport.to_html,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        help="minilm, torchvision:NAME, hf:DIRECTORY_OR_NAME, module.py:factory or onnx:FILE",
    )
    parser.add_argument(
        "--recipe",
        help=f"a YAML file, or one of {', '.join(recipe.names())}; none for a checkpoint that is MX already",
    )
    parser.add_argument(
        "--calibration",
        help="folder of .pt/.npz batches, of images (.png, .jpg) or of recordings (.wav), of a language model a text, "
        "or none; by default the model's built-in sample",
    )
    parser.add_argument(
        "--optimize",
        choices=[*PRESETS, "none"],
        help="round the weights by a preset of pt2mx.optimize, with the batches of --calibration; by default as the "
        "section algorithms: of the recipe says, none without one",
    )
    parser.add_argument(
        "--output",
        default="out.pt2",
        help="the exported program to write (default: out.pt2), or of a language model a folder",
    )
    add_device(parser, "where the model is quantized, and its program runs")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="of a language model: divide its layers among N ranks of torchrun (default: 1)",
    )
    parser.add_argument("--compile", action="store_true", help="also compile the result and compare it with eager")
    parser.add_argument("--report", help="file to write the report to; its name ends in .json, .html or .htm")
    parser.add_argument(
        "--allow-nan", action="store_true", help="go on, with a warning, where weights or batches hold NaN or Inf"
    )
    parser.set_defaults(run=_quantize)


def _quantize(options: argparse.Namespace) -> None:
    check_device(options.device)
    is_language_model = options.model.startswith("hf:") and Path(options.output).suffix.lower() != ".pt2"
    if is_language_model:
        ready = importlib.import_module("pt2mx.pt2e.cli.mx_checkpoint")  # imports transformers
        if ready.is_for(options):
            ready.load_to_folder(options)
            return
    if options.recipe is None:
        raise MXError(f"give --recipe, a YAML file or one of {', '.join(recipe.names())}")
    quantizer = MXQuantizer.from_recipe(options.recipe)  # a typo in it should not cost the loading of a model
    if options.optimize is not None:
        quantizer.set_algorithms(None if options.optimize == "none" else options.optimize)
    if is_language_model:
        importlib.import_module("pt2mx.pt2e.cli.language").quantize_to_folder(options, quantizer)
        return
    if options.model.startswith("onnx:"):
        _check_files(options)
        _write_report(importlib.import_module("pt2mx.pt2e.cli.onnx_files").quantize_file(options, quantizer), options)
        return
    if options.tensor_parallel != 1:
        raise MXError("--tensor-parallel is for a language model: give --model hf:NAME, and --output a folder")
    if options.calibration == "none" and look_at_inputs(quantizer.algorithms or ()):
        raise MXError("the algorithms look at inputs: give --calibration a folder of batches, or --optimize fast")
    _check_files(options)
    with Stages(5 if quantizer.algorithms is None else 6) as progress:
        loaded = _load(options)
        batches = _calibration(loaded, options)

        progress.begin("export")
        float_model = _export(loaded)
        optimized = float_model
        if quantizer.algorithms is not None:
            progress.begin("optimize")
            optimized = _optimize(float_model, quantizer, batches)
        prepared = _prepare(optimized, quantizer, options)

        progress.begin("calibrate")
        _calibrate(prepared, batches)

        progress.begin("convert")
        converted = _convert(prepared, options)
        found = _compare(converted, float_model, list(batches.values()) or [loaded.example], options)

        progress.begin("save")
        _save(converted, loaded, quantizer, options)
        progress.update()
        seconds = progress.seconds()
    report = quantization_report(converted)
    _write_report(report, options)
    print(report.to_table())
    if quantizer.algorithms is not None:
        print(_rounded(optimized))
    if options.compile:
        with user_errors("compile the result"):
            print(_compare_compiled(converted, loaded.example))
    print(f"output against the float model: {found}")
    size = Path(options.output).stat().st_size
    print(f"{options.output}: {size / 1e6:.1f} MB, {report.effective_bits:.2f} bits a value; {seconds}")


def _check_files(options: argparse.Namespace) -> None:
    check_output(options.output)
    if options.report is not None:
        check_output(options.report, suffixes=tuple(_REPORTS))
    inputs = {"--recipe": options.recipe if Path(options.recipe).is_file() else None}
    inputs["the model"] = source_file(options.model)
    if options.calibration not in (None, "none"):
        inputs |= {f"the calibration batch {file.name!r}": file for file in batch_files(options.calibration)}
    check_distinct({"--output": options.output, "--report": options.report}, inputs)


def _load(options: argparse.Namespace) -> LoadedModel:
    with user_errors("load the model"):
        loaded = load_model(options.model).to(options.device)
    _refuse_nan("the weights", nonfinite_parameters(loaded.module), options)
    return loaded


def _calibration(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Batch]:
    """Return the batches to calibrate with, by their files or, for a built-in one, its number."""
    if options.calibration is None:
        batches = {f"built-in batch {i}": batch for i, batch in enumerate(loaded.batches)}
    elif options.calibration == "none":
        return {}
    else:
        given = load_batches(options.calibration, loaded.readers)
        conformed = {source: loaded.conform(batch, source, note) for source, batch in given.items()}
        batches = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(options.device), conformed)
    for source, batch in batches.items():
        _refuse_nan(f"{source}: the inputs", _nonfinite_inputs(loaded, batch), options)
    return batches


def _nonfinite_inputs(loaded: LoadedModel, batch: Batch) -> Iterable[str]:
    """Yield the inputs that hold a NaN, or no finite value: a mask may hold -Inf beside others."""
    leaves = pytree.tree_leaves(batch)
    for name, leaf in zip(loaded.signature.names, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            if leaf.isnan().any() or not leaf.isfinite().any():
                yield name


def _refuse_nan(what: str, names: Iterable[str], options: argparse.Namespace) -> None:
    """Raise an error if there are names; with `--allow-nan` note a warning."""
    if names := list(names):
        text = f"NaN or Inf in {what} {listed(names)}"
        if not options.allow_nan:
            raise MXError(f"{text}: mend it, or give --allow-nan to quantize all the same")
        note(f"warning: {text}")


def _export(loaded: LoadedModel) -> GraphModule:
    with user_errors("export the model"):
        return loaded.export().module()


def _optimize(model: GraphModule, quantizer: MXQuantizer, batches: dict[str, Batch]) -> GraphModule:
    inputs = model.graph.find_nodes(op="placeholder")
    masks = [node.name for node in inputs if node.name == "attention_mask" and is_padding_mask(node)]
    with user_errors("optimize the weights"), torch.no_grad():
        return optimize(
            model,
            quantizer,
            list(batches.values()),
            padding_mask=masks[0] if masks else None,
            progress=sys.stderr.isatty(),
        )


def _prepare(optimized: GraphModule, quantizer: MXQuantizer, options: argparse.Namespace) -> GraphModule:
    """The prepared model, in which something will be quantized."""
    with user_errors("prepare the model"):
        prepared = prepare_pt2e(optimized, quantizer)
    if not any(operator.quantized for operator in quantization_report(prepared).operators):
        raise MXError(f"the recipe {options.recipe!r} selects no operator of the model: nothing would be quantized")
    return prepared


def _calibrate(prepared: GraphModule, batches: dict[str, Batch]) -> None:
    with torch.no_grad():
        for source, batch in tqdm(batches.items(), desc="batches", leave=False, disable=None, file=sys.stderr):
            with user_errors(f"run the calibration batch {source} through the model"):
                call(prepared, batch)


def _convert(prepared: GraphModule, options: argparse.Namespace) -> GraphModule:
    with user_errors("convert the model"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "NaN or Inf in")  # it is told here
        converted = convert_pt2e(prepared)
    _refuse_nan("what is quantized:", nonfinite_operands(converted), options)
    return converted


def _compare(
    converted: GraphModule, float_model: GraphModule, batches: list[Batch], options: argparse.Namespace
) -> Fidelity:
    with torch.no_grad(), user_errors("run the converted model"):
        found = fidelity((call(converted, batch), call(float_model, batch)) for batch in batches)
    nan = ["there is nothing to compare"] * math.isnan(found.sqnr)
    _refuse_nan("every output of the float model:", nan, options)
    return found


def _save(converted: GraphModule, loaded: LoadedModel, quantizer: MXQuantizer, options: argparse.Namespace) -> None:
    with user_errors("export the converted model"):
        program = export(converted, loaded.example, loaded.dynamic_shapes)
    with user_errors(f"write {options.output!r}"):
        save_program(program, options.output, quantizer)


def _rounded(optimized: GraphModule) -> str:
    """A line on what the optimization did."""
    weights = optimization_report(optimized).weights
    counts = Counter(weight.algorithm or "nearest values" for weight in weights)
    how = ", ".join(f"{count} rounded by {name}" for name, count in counts.items())
    changed = f"{sum(bool(w.smoothed) for w in weights)} smoothed, {sum(bool(w.rotated) for w in weights)} rotated"
    return f"{len(weights)} weights: {how}; {changed}"


def _write_report(report: QuantizationReport, options: argparse.Namespace) -> None:
    if options.report:
        with user_errors(f"write {options.report!r}"):
            _REPORTS[Path(options.report).suffix.lower()](report, options.report)


def _compare_compiled(converted: GraphModule, batch: Batch) -> str:
    compiled = torch.compile(converted)
    with torch.no_grad():
        return f"compiled against eager: {fidelity([(call(compiled, batch), call(converted, batch))])}"
