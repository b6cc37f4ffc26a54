"""Language models on the command line: a checkpoint's folder, and the folder that `pt2mx quantize` makes of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pt2mx.algorithms.options import look_at_inputs
from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.checkpoints.coverage import CheckpointValues, Coverage
from pt2mx.pt2e.cli.checked_model import note_coverage
from pt2mx.pt2e.cli.hugging_face import checkpoint_values, from_pretrained
from pt2mx.pt2e.cli.output_names import check_folder_name
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.cli.summary import quantized
from pt2mx.pt2e.language import ranks
from pt2mx.pt2e.language.folder import REPORT, load_tokenizer
from pt2mx.pt2e.language.quantize import quantize_language_model
from pt2mx.pt2e.language.tensor_parallel import shard
from pt2mx.pt2e.language.texts import blocks, built_in_text, read_text
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import QuantizationReport, quantization_report
from pt2mx.pt2e.user_errors import one_line, user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_decoder(
    name: str, part: str | None = None, allow_partial: bool = False, dtype: str | None = None
) -> PreTrainedModel:
    """Return the causal language model of a checkpoint, in evaluation mode.

    Args:
        name: a local folder, or a name on the hub.
        part, allow_partial: which tensors of the checkpoint the model may leave out, as `Coverage.check` takes them.
        dtype: in which it is loaded, such as "bfloat16"; None: its own.

    Raises:
        MXError: for a checkpoint that cannot be loaded, or holds another kind of model.
    """
    transformers = import_extra("transformers", "hf")
    try:
        model = from_pretrained(transformers.AutoModelForCausalLM, name, dtype)
        checkpoint_values(model, name).held_by().check(part, allow_partial)
        return model
    except MXError:
        raise
    except Exception as error:  # of any of the libraries that read a checkpoint
        raise MXError(
            f"{name!r} is no causal language model that can be loaded (a local folder works offline; for another model "
            f"give --output a name that ends in .pt2): {one_line(error)}"
        ) from None


def calibration(source: str | None, tokenizer: Any, quantizer: MXQuantizer) -> list[Tensor]:
    """Return the blocks of tokens to calibrate with: of a text, by default of the built-in one, or none.

    Raises:
        MXError: for a text that cannot be read, and where an algorithm needs one.
    """
    if source == "none" or (source is None and tokenizer is None):
        if look_at_inputs(quantizer.algorithms or ()):
            raise MXError("the algorithms look at inputs: give --calibration a text, and the folder a tokenizer")
        return []
    return blocks(built_in_text() if source is None else read_text(source), tokenizer)


def quantize_to_folder(options: argparse.Namespace, quantizer: MXQuantizer) -> Result | None:
    """The command `pt2mx quantize` for a language model; its result, on the first rank."""
    _check(options)
    places = ranks.places(options.tensor_parallel)
    if len(places) > 1:
        _check_blind(options, quantizer)
    stages = 4 if quantizer.algorithms is None else 5
    with ranks.first_speaks(), Progress(1 + stages * len(places)) as progress:
        name = options.model.removeprefix("hf:")
        model = load_decoder(name, options.part, options.allow_partial, options.dtype).to(options.device)
        values, tokenizer = checkpoint_values(model, name), load_tokenizer(name)
        if tokenizer is None:
            note(f"{name} holds no tokenizer: the result takes and gives tokens, no text")
        texts = calibration(options.calibration, tokenizer, quantizer) if len(places) == 1 else []
        reports = []
        for place in places:
            with place:
                reports.append(_quantize_rank(model, quantizer, texts, tokenizer, options, progress, values))
        progress.end()
        ranks.wait()
    report, coverage = reports[0]
    return quantized(report, options, progress, coverage=coverage) if ranks.is_first() else None


def _quantize_rank(
    model: PreTrainedModel,
    quantizer: MXQuantizer,
    texts: list[Tensor],
    tokenizer: Any,
    options: argparse.Namespace,
    progress: Progress,
    values: CheckpointValues,
) -> tuple[QuantizationReport, Coverage]:
    """Write what a rank has of the model, the only one or one of several, and give the report of that, and the share of
    the checkpoint that it holds."""
    with user_errors("quantize the model"):
        part = model if options.tensor_parallel == 1 else shard(model)
        partial = {"part": options.part, "allow_partial": options.allow_partial}
        found = quantize_language_model(part, quantizer, texts, tokenizer, progress.begin, **partial)
    coverage = values.held_by(found.coverage.read)
    note_coverage(coverage)
    report = quantization_report(found.program.module())
    if not any(operator.quantized for operator in report.operators):
        raise MXError(f"the recipe {options.recipe!r} selects no operator of the model: nothing would be quantized")
    progress.begin("save")
    with user_errors(f"write {options.output!r}"):
        found.save_pretrained(options.output, quantizer)
        if ranks.is_first():
            report.to_json(options.report or Path(options.output) / REPORT)
    return report, coverage


def _check(options: argparse.Namespace) -> None:
    """Raise an error for what a folder cannot be made of, before the work."""
    if options.compile:
        raise MXError("--compile is for a program: `pt2mx generate --compile` compiles a language model")
    check_folder_name(options.output, options.model.removeprefix("hf:"))
    if options.tensor_parallel < 1:
        raise MXError(f"--tensor-parallel {options.tensor_parallel} must be at least 1")


def _check_blind(options: argparse.Namespace, quantizer: MXQuantizer) -> None:
    """Raise an error for what one process cannot do: a rank without the others computes no values."""
    if options.calibration not in (None, "none") or look_at_inputs(quantizer.algorithms or ()):
        raise MXError(
            "calibration takes the values of all ranks: run `torchrun --nproc-per-node "
            f"{options.tensor_parallel} -m pt2mx quantize ...`, or give --optimize fast or none, and no --calibration"
        )
