"""The command `pt2mx quantize`: export, calibrate, convert and save a model."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from tqdm import tqdm

from pt2mx.algorithms.options import look_at_inputs
from pt2mx.analysis.agreement import Fidelity, fidelity
from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.checks import check_compiler, check_device, chosen_recipe, normalization_of, writes_folder
from pt2mx.pt2e.cli.destinations import form_of, with_next_steps
from pt2mx.pt2e.cli.float_model import export, exported_module, load_eval_batches, load_float_model, refuse_nan
from pt2mx.pt2e.cli.inputs import arrays_by_name
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result, quantized_result, write_report
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.flow.convert import convert_pt2e
from pt2mx.pt2e.flow.prepare import prepare_pt2e
from pt2mx.pt2e.flow.weights import nonfinite_operands
from pt2mx.pt2e.models.float_models import Batch, LoadedModel, call
from pt2mx.pt2e.models.image_files import normalizing_reader
from pt2mx.pt2e.models.input_files import Reader, load_batches
from pt2mx.pt2e.models.names import IMAGES
from pt2mx.pt2e.optimize.calibrate import named_padding_mask
from pt2mx.pt2e.optimize.optimize import checked_anchor, optimize
from pt2mx.pt2e.optimize.report import optimization_report
from pt2mx.pt2e.program.build_program import can_become_program, program_of
from pt2mx.pt2e.program.program import save_program
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import QuantizationReport, quantization_report
from pt2mx.pt2e.report.rows import operator_reports


def run(options: argparse.Namespace) -> Result | None:
    check_device(options.device)
    if options.model.startswith("hf:"):
        from pt2mx.pt2e.cli import language  # imports transformers

        if language.is_quantized_checkpoint(options):
            return language.load_to_folder(options)
    options.recipe = chosen_recipe(options)
    form = form_of(options)  # a typo in the recipe should not cost the loading of a model
    result = _quantize(options, form.quantizer)
    return result if result is None or not options.destinations else with_next_steps(result, form, options)


def _quantize(options: argparse.Namespace, quantizer: MXQuantizer) -> Result | None:
    if options.anchor is not None:
        if quantizer.algorithms is None:
            raise MXError("--anchor keeps what algorithms round: give --optimize fast, imatrix or balanced")
        checked_anchor(options.anchor, quantizer.algorithms)
    if writes_folder(options):
        from pt2mx.pt2e.cli import language

        return language.quantize_to_folder(options, quantizer)
    if options.compile:
        check_compiler()
    if options.model.startswith("onnx:"):
        return _quantize_onnx(options, quantizer)
    if options.calibration == "none" and look_at_inputs(quantizer.algorithms or ()):
        raise MXError("the algorithms look at inputs: give --calibration a folder of batches, or --optimize fast")
    return _quantize_program(options, quantizer)


def _quantize_onnx(options: argparse.Namespace, quantizer: MXQuantizer) -> Result:
    import_extra("onnx", "onnx")
    from pt2mx.pt2e.onnx.quantize.quantize_onnx import quantize_onnx

    path = options.model.removeprefix("onnx:")
    with Progress(2) as progress:
        batches = _onnx_batches(options, path)
        progress.begin("quantize")
        with user_errors(f"quantize {path!r}"):
            report = quantize_onnx(path, options.output, quantizer, batches, allow_nan=options.allow_nan)
    _write_report(report, options, quantizer, report.fidelity)
    size = [f"the float file: {Path(path).stat().st_size / 1e6:.1f} MB"]
    return quantized_result(report, options, progress, lines=size, output_against_the_float_model=report.fidelity)


def _onnx_batches(options: argparse.Namespace, path: str) -> list[dict[str, np.ndarray]] | None:
    """Load the batches of `--calibration`, each by the names of the inputs; None without any."""
    from pt2mx.pt2e.onnx.files import inputs_of

    if options.calibration in (None, "none"):
        return None
    onnx = import_extra("onnx", "onnx")
    with user_errors(f"read {path!r}"):
        graph = onnx.load(path, load_external_data=False).graph
    inputs = inputs_of(graph)
    names = [value.name for value in inputs]
    readers: dict[str, Reader] = {}
    if (how := normalization_of(options)) is not None:
        if len(names) != 1:
            raise MXError(f"--image-size, --mean and --std are for models of one input, and this one takes {names}")
        tensor = inputs[0].type.tensor_type
        dtype = torch.from_numpy(np.empty(0, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))).dtype
        readers[IMAGES] = normalizing_reader(how, names[0], [dim.dim_value or None for dim in tensor.shape.dim], dtype)
    return [arrays_by_name(batch, names, file) for file, batch in load_batches(options.calibration, readers).items()]


def _quantize_program(options: argparse.Namespace, quantizer: MXQuantizer) -> Result:
    """Quantize a model and save it as a program; with `--anchor`, one whose weights can be sliced to the recipe's."""
    stored = quantizer
    if options.anchor is not None:
        stored = quantizer.with_weights(checked_anchor(options.anchor, quantizer.algorithms or ()))
    with Progress(6 + (quantizer.algorithms is not None) + options.compile) as progress:
        loaded = load_float_model(options)
        batches = load_eval_batches(loaded, options)

        progress.begin("export")
        float_model, coverage, program = exported_module(loaded, options.part, options.allow_partial)
        optimized = float_model
        if quantizer.algorithms is not None:
            progress.begin("optimize")
            optimized = _optimize(float_model, quantizer, batches, options.anchor)

        progress.begin("calibrate")
        prepared = _prepare(optimized, stored, options)
        _calibrate(prepared, batches)

        progress.begin("convert")
        converted = _convert(prepared, options)

        progress.begin("compare")
        agreement = _compare(converted, float_model, list(batches.values()) or [loaded.example], options)

        progress.begin("save")
        _save(converted, program, loaded, stored, options)
        report = quantization_report(converted)
        _write_report(report, options, stored, agreement, before=float_model, after=converted)

        compiled = None
        if options.compile:
            progress.begin("compile")
            with user_errors("compile the result"):
                compiled = _compare_compiled(converted, loaded.example)
    rounding = [] if quantizer.algorithms is None else [_describe_optimization(optimized)]
    return quantized_result(
        report,
        options,
        progress,
        lines=rounding,
        coverage=coverage,
        compiled_against_eager=compiled,
        output_against_the_float_model=agreement,
    )


def _optimize(model: GraphModule, quantizer: MXQuantizer, batches: dict[str, Batch], anchor: str | None) -> GraphModule:
    with user_errors("optimize the weights"), torch.no_grad():
        return optimize(
            model,
            quantizer,
            list(batches.values()),
            anchor=anchor,
            padding_mask=named_padding_mask(model),
            progress=sys.stderr.isatty(),
        )


def _prepare(optimized: GraphModule, quantizer: MXQuantizer, options: argparse.Namespace) -> GraphModule:
    """Prepare the model; raise an `MXError` where the recipe quantizes nothing in it."""
    with user_errors("prepare the model"):
        prepared = prepare_pt2e(optimized, quantizer)
    if not any(operator.quantized for operator in operator_reports(prepared)):
        raise MXError(f"the recipe {options.recipe!r} selects no operator of the model: nothing would be quantized")
    return prepared


def _calibrate(prepared: GraphModule, batches: dict[str, Batch]) -> None:
    with torch.no_grad():
        for source, batch in tqdm(batches.items(), desc="batches", leave=False, disable=None, file=sys.stderr):
            with user_errors(f"run the calibration batch {source} through the model"):
                call(prepared, batch)


def _convert(prepared: GraphModule, options: argparse.Namespace) -> GraphModule:
    with user_errors("convert the model"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "NaN or Inf in")  # `refuse_nan` names it
        converted = convert_pt2e(prepared)
    refuse_nan("what is quantized:", nonfinite_operands(converted), options)
    return converted


def _compare(
    converted: GraphModule, float_model: GraphModule, batches: list[Batch], options: argparse.Namespace
) -> Fidelity:
    with torch.no_grad(), user_errors("run the converted model"):
        agreement = fidelity((call(converted, batch), call(float_model, batch)) for batch in batches)
    nan = ["there is nothing to compare"] * math.isnan(agreement.sqnr)
    refuse_nan("every output of the float model:", nan, options)
    return agreement


def _save(
    converted: GraphModule,
    program: ExportedProgram,
    loaded: LoadedModel,
    quantizer: MXQuantizer,
    options: argparse.Namespace,
) -> None:
    """Save the graph made of a program as a program. Export it again only if it has subgraphs, or other outputs than
    tensors."""
    with user_errors("export the converted model"):
        if can_become_program(converted, program):
            program = program_of(converted, program)
        else:
            program = export(converted, loaded.example, loaded.dynamic_shapes)
    with user_errors(f"write {options.output!r}"):
        save_program(program, options.output, quantizer)


def _describe_optimization(optimized: GraphModule) -> str:
    weights = optimization_report(optimized).weights
    counts = Counter(weight.algorithm or "nearest values" for weight in weights)
    rounded = ", ".join(f"{count} rounded by {name}" for name, count in counts.items())
    changed = f"{sum(bool(w.smoothed) for w in weights)} smoothed, {sum(bool(w.rotated) for w in weights)} rotated"
    return f"{len(weights)} weights: {rounded}; {changed}"


def _write_report(
    report: QuantizationReport,
    options: argparse.Namespace,
    quantizer: MXQuantizer,
    agreement: Fidelity | None,
    before: GraphModule | None = None,
    after: GraphModule | None = None,
) -> None:
    """Write the report where `--report` asks for it; a page also has the recipe, the quality and the graphs."""
    if not options.report:
        return
    as_named = options.optimize is None and options.anchor is None and not options.destinations
    recipe = options.recipe if as_named else quantizer
    quality = {} if agreement is None else {"cosine": agreement.cosine, "SQNR in dB": agreement.sqnr}
    page = {"model": options.model, "recipe": recipe, "quality": quality, "before": before, "after": after}
    write_report(report, options.report, **page)


def _compare_compiled(converted: GraphModule, batch: Batch) -> Fidelity:
    compiled = torch.compile(converted)
    with torch.no_grad():
        return fidelity([(call(compiled, batch), call(converted, batch))])
