"""The command `pt2mx export-onnx`: write an exported program, or the decoder of a language model, as an ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from pt2mx.analysis.agreement import describe_agreement
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.programs import example_call, load_folder, load_program_file
from pt2mx.pt2e.cli.progress import Progress
from pt2mx.pt2e.cli.result import Result, size_of
from pt2mx.pt2e.onnx.export import export_onnx
from pt2mx.pt2e.onnx.runtime import RUNTIMES, load

if TYPE_CHECKING:
    from pt2mx.pt2e.language.language_model import LanguageModel

#: tokens of each prompt on which a decoder's file is compared with the language model
_TOKENS = 16


def run(options: argparse.Namespace) -> Result:
    import_extra("onnx", "onnx")
    is_folder = Path(options.program).is_dir()
    with Progress(3) as progress:
        model = load_folder(options.program, "cpu") if is_folder else load_program_file(options.program)
        progress.begin("export")
        nodes = export_onnx(model, options.output, opset=options.opset, target=options.target)
        progress.begin("compare")
        runtime = options.target if options.target in RUNTIMES else "onnxruntime"
        agreement = _compare(options.output, model, runtime)
    size = Path(options.output).stat().st_size
    programs = Path(options.program).glob("program*.pt2") if is_folder else [options.program]
    before = sum(map(size_of, programs))
    text = (
        f"{options.output}: {size:,} bytes (the program: {before:,}), {nodes} MX nodes; {progress.seconds()}\n"
        f"{runtime} against the program: {agreement}"
    )
    data = {
        "output": options.output,
        "bytes": size,
        "program_bytes": before,
        "mx_nodes": nodes,
        f"{runtime}_against_the_program": agreement,
        "seconds": progress.times(),
    }
    return Result(text, data)


def _compare(path: str, model: ExportedProgram | LanguageModel, runtime: str) -> str:
    try:
        runnable = load(path, runtime)
        inputs, expected = example_call(model) if isinstance(model, ExportedProgram) else _of_prompts(model)
        arrays = [x.numpy() for x in inputs if isinstance(x, Tensor)]
        outputs = [torch.from_numpy(y) for y in runnable.call(dict(zip(runnable.inputs, arrays, strict=True))).values()]
        if not isinstance(model, ExportedProgram):
            outputs = outputs[:1]  # the others are keys and values
        return describe_agreement(outputs, [y for y in expected if isinstance(y, Tensor)])
    except Exception as error:  # it is not installed, lacks kernels, or has outputs in another form (complex ones)
        return f"not compared: {(str(error).strip() or type(error).__name__).splitlines()[0]}"


@torch.no_grad()
def _of_prompts(model: Any) -> tuple[list[object], list[object]]:
    """Return the inputs of a decoder's file for two prompts, and the logits of the language model for them."""
    tokens = torch.arange(2 * _TOKENS).reshape(2, -1) % model.config.vocab_size
    inputs: list[object] = [tokens, torch.ones_like(tokens)]
    for layer in model.layers:
        for past in layer.values():
            inputs.append(past.new_zeros((2, *past.shape[1:]), dtype=torch.float32, device="cpu"))
    return inputs, [model(tokens).logits.float()]
