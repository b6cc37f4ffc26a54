"""Language models on the command line: `quantize` writes a folder, also for MX checkpoints; `compile` adds packages."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pt2mx.algorithms.options import look_at_inputs
from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.configs import read_config
from pt2mx.pt2e.checkpoints.destinations import destination_named
from pt2mx.pt2e.checkpoints.load import is_mx_checkpoint, load_checkpoint
from pt2mx.pt2e.cli.audio import calibration_audio, takes_audio
from pt2mx.pt2e.cli.card import describe_output
from pt2mx.pt2e.cli.checks import TRAINING, check_folder_name, option_of
from pt2mx.pt2e.cli.float_model import note_coverage
from pt2mx.pt2e.cli.programs import load_folder
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.prompts import image_prompt, images_in
from pt2mx.pt2e.cli.result import Result, quantized_result
from pt2mx.pt2e.files.card_metadata import REPORT
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.language import ranks
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.lessons import generate_lessons
from pt2mx.pt2e.language.quantize import quantize_language_model
from pt2mx.pt2e.language.signature import example_inputs
from pt2mx.pt2e.language.tensor_parallel import shard
from pt2mx.pt2e.language.texts import blocks, built_in_text, read_text
from pt2mx.pt2e.language.vision import check_trains, has_tower
from pt2mx.pt2e.models.checkpoint_files import CONFIG, quantization_of
from pt2mx.pt2e.models.coverage import CheckpointValues, Coverage
from pt2mx.pt2e.models.gguf_model import gguf_in
from pt2mx.pt2e.models.pretrained import checkpoint_values, load_language_model
from pt2mx.pt2e.models.processors import FeatureExtractor
from pt2mx.pt2e.models.tokenizers import load_processor, load_tokenizer
from pt2mx.pt2e.optimize.training_checkpoint import make_folder
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import QuantizationReport, quantization_report

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: options that say how to quantize -> their values that ask for nothing
_QUANTIZING = {
    "recipe": (None,),
    "optimize": (None, "none"),
    "calibration": (None, "none"),
    "distill": (None,),
    "tensor_parallel": (1,),
    "text_length": (None,),
    "compile": (False,),
    "dtype": (None,),
}
_NO_TOKENIZER = "{} holds no tokenizer: the result takes and gives tokens, no text"
#: tokens, in two texts, on which packages are compared with the program
_TOKENS = 32
#: samples of the audio for these tokens
_SAMPLES = 8000


def calibration_blocks(source: str | None, tokenizer: Any, quantizer: MXQuantizer) -> list[Tensor]:
    """Return the blocks of tokens to calibrate with: of a text, by default the built-in one, or none."""
    if source == "none" or (source is None and tokenizer is None):
        if look_at_inputs(quantizer.algorithms or ()):
            raise MXError("the algorithms look at inputs: give --calibration a text, and the folder a tokenizer")
        return []
    return blocks(built_in_text() if source is None else read_text(source), tokenizer)


def quantize_to_folder(options: argparse.Namespace, quantizer: MXQuantizer) -> Result | None:
    """Run `pt2mx quantize` for a language model. Only the first rank returns a result."""
    _check_quantize(options)
    text = None if options.distill is None else read_text(options.distill)
    contexts: list[AbstractContextManager[None]] = [nullcontext()]
    training = _training(options)
    if text is None:
        contexts = ranks.rank_contexts(options.tensor_parallel)
    else:  # all ranks train one model
        training |= {"group": ranks.join_all(), "progress": True}
    if len(contexts) > 1:
        _check_without_values(options, quantizer)
    stages = 4 + (quantizer.algorithms is not None) + (options.distill is not None) + bool(options.distill_generated)
    with ranks.only_first_prints(), Progress(1 + stages * len(contexts)) as progress:
        name = options.model.removeprefix("hf:")
        model = load_language_model(name, options.part, options.allow_partial, options.dtype).to(options.device)
        _check_layers(model, options.destinations)
        if text is not None:
            check_trains(model, options.part)
        values, tokenizer = checkpoint_values(model, name), load_tokenizer(name)
        if tokenizer is None:
            note(_NO_TOKENIZER.format(name))
        processor = load_processor(name) if has_tower(model) and options.part is None else None
        texts: Sequence[Any] = []
        if takes_audio(model):
            texts = calibration_audio(options.calibration, model, name, quantizer)
        elif len(contexts) == 1:
            texts = _calibration(options.calibration, tokenizer, processor, quantizer)
        lessons = [] if text is None else blocks(text, tokenizer)
        if options.distill_generated:
            progress.begin("generate")
            with user_errors("write text to train on"):
                written = generate_lessons(model, lessons)
            lessons = list(ranks.of_first(iter(written)))
        reports = []
        for context in contexts:
            with context:
                with user_errors("quantize the model"):
                    result = quantize_language_model(
                        model if options.tensor_parallel == 1 else shard(model),
                        quantizer,
                        texts,
                        processor or tokenizer,
                        progress.begin,
                        lessons=lessons,
                        training=training,
                        part=options.part,
                        allow_partial=options.allow_partial,
                        length=options.text_length,
                    )
                reports.append(_write_rank(model, result, quantizer, options, progress, values))
        progress.end()
        ranks.wait()
    if not ranks.is_first():
        return None
    with user_errors(f"write {options.output!r}"):
        describe_output(options, name, report=options.report)
    report, coverage = reports[0]
    return quantized_result(report, options, progress, coverage=coverage)


def _write_rank(
    model: PreTrainedModel,
    result: LanguageModel,
    quantizer: MXQuantizer,
    options: argparse.Namespace,
    progress: Progress,
    values: CheckpointValues,
) -> tuple[QuantizationReport, Coverage]:
    """Write a rank's shard, the whole model if there is one rank; return its report and coverage."""
    coverage = values.held_by(result.coverage.read)
    note_coverage(coverage)
    report = quantization_report(result)
    if not any(one.quantized for one in report.operators):
        raise MXError(f"the recipe {options.recipe!r} selects no operator of the model: nothing would be quantized")
    progress.begin("save")
    if options.distill is not None and not ranks.is_first():
        return report, coverage  # all ranks have the same model
    with user_errors(f"write {options.output!r}"):
        result.save_pretrained(options.output, quantizer)
        if takes_audio(model):
            FeatureExtractor(options.model.removeprefix("hf:"), model.config).save(options.output)
        if ranks.is_first():
            report.to_json(options.report or Path(options.output) / REPORT)
    return report, coverage


def _calibration(
    source: str | None, tokenizer: Any, processor: Any, quantizer: MXQuantizer
) -> Sequence[Tensor | Mapping[str, Tensor]]:
    """Return what to calibrate with: blocks of text; for a folder of images also a prompt with each of them."""
    images = images_in(source) if processor is not None and source is not None else []
    prompts = [image_prompt(processor, "Describe this image.", [image]) for image in images]
    return [*calibration_blocks(None if images else source, tokenizer, quantizer), *prompts]


def _check_quantize(options: argparse.Namespace) -> None:
    if options.compile:
        raise MXError("--compile is for a program: `pt2mx generate --compile` compiles a language model")
    check_folder_name(options.output, options.model.removeprefix("hf:"))


def _training(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `pt2mx.distill` that are given; make the folder of a checkpoint before the model loads."""
    if options.distill_checkpoint is not None:
        make_folder(options.distill_checkpoint)
    given = {name.removeprefix("distill_"): getattr(options, name) for name in TRAINING}
    return {name: value for name, value in given.items() if value is not None}


def _check_layers(model: PreTrainedModel, destinations: Sequence[str]) -> None:
    """Raise an `MXError` for a model whose layers no checkpoint of a destination holds: those of GPT-2."""
    layers = [name for name, module in model.named_modules() if type(module).__name__ == "Conv1D"]
    refusing = [name for name in destinations if destination_named(name).layouts]
    if layers and refusing:
        raise MXError(
            f"{layers[0]} is a Conv1D: checkpoints, which {refusing[0]} takes, hold weights of linear layers, "
            "embeddings and experts; leave --for out, or name another destination"
        )


def _check_without_values(options: argparse.Namespace, quantizer: MXQuantizer) -> None:
    """Raise an `MXError` for options that need values, which one process cannot compute without the other ranks."""
    if options.calibration not in (None, "none") or look_at_inputs(quantizer.algorithms or ()):
        raise MXError(
            "calibration takes the values of all ranks: run `torchrun --nproc-per-node "
            f"{options.tensor_parallel} -m pt2mx quantize ...`, or give --optimize fast or none, and no --calibration"
        )


def is_quantized_checkpoint(options: argparse.Namespace) -> bool:
    """Return True where `--model` is a checkpoint in MX formats whose codes are kept.

    `--recipe`, and `--for`, which chooses one, take the values of a GGUF file.

    Raises:
        MXError: without a recipe, for a checkpoint that another method quantized.
    """
    folder = options.model.removeprefix("hf:")
    if (options.recipe is not None or options.destinations) and gguf_in(folder) is not None:
        return False
    if is_mx_checkpoint(folder):
        return True
    if options.recipe is None and (Path(folder) / CONFIG).is_file() and (config := quantization_of(Path(folder))):
        read_config(config)
    return False


def load_to_folder(options: argparse.Namespace) -> Result:
    """Run `pt2mx quantize` for an MX checkpoint: its codes and scales go into the program unchanged."""
    name = options.model.removeprefix("hf:")
    _check_load(options)
    with Progress(3) as progress:
        with user_errors(f"load {name!r}"):
            partial = {"part": options.part, "allow_partial": options.allow_partial}
            loaded = load_checkpoint(name, options.device, progress.begin, **partial)
        note_coverage(loaded.coverage)
        if loaded.tokenizer is None:
            note(_NO_TOKENIZER.format(name))
        report = quantization_report(loaded)
        progress.begin("save")
        with user_errors(f"write {options.output!r}"):
            loaded.save_pretrained(options.output)
            report.to_json(options.report or Path(options.output) / REPORT)
            describe_output(options, name, report=options.report, codes=name)
    return quantized_result(report, options, progress, coverage=loaded.coverage)


def _check_load(options: argparse.Namespace) -> None:
    if options.destinations:
        raise MXError(f"{options.model!r} is quantized already: leave --for out, or give the float checkpoint")
    for name, nothing in _QUANTIZING.items():
        if getattr(options, name) not in nothing:
            raise MXError(
                f"{options.model!r} is quantized already, and taken as it is: leave {option_of(name)} out, or give the "
                "float checkpoint"
            )
    if Path(options.output).suffix.lower() == ".pt2":
        raise MXError(f"{options.model!r} becomes a language model: give --output a folder, not {options.output!r}")
    check_folder_name(options.output, options.model.removeprefix("hf:"))


def compile_folder(options: argparse.Namespace) -> Result:
    """Run `pt2mx compile` for a language model: write packages for prompts and for single tokens into its folder."""
    with Progress(3) as progress:
        model = load_folder(options.program, options.device)
        progress.begin("compile")
        with user_errors("compile the model"):
            paths = model.write_packages(options.program)
        progress.begin("compare")
        with user_errors("run the packages"):
            same = _count_agreement(model, load_folder(options.program, options.device))
    sizes = {str(path): path.stat().st_size for path in paths}
    text = [
        f"compiled against eager: {same} of {_TOKENS} tokens are the same",
        *(f"{path}: {size / 1e6:.1f} MB" for path, size in sizes.items()),
        progress.seconds(),
    ]
    data = {"packages": sizes, "tokens": _TOKENS, "same_tokens": same, "seconds": progress.times()}
    return Result("\n".join(text), data)


def _count_agreement(model: LanguageModel, compiled: LanguageModel) -> int:
    """Count the tokens for which both predict the same most likely one."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (2, _TOKENS // 2), generator=torch.Generator().manual_seed(0)).to(model.device)
    if (image := getattr(model.config, "image_token_id", None)) is not None:
        ids[ids == image] = 0  # there is no image
    inputs = {"input_ids": ids}
    if model.encoder is not None and model.config.is_encoder_decoder:
        expected = example_inputs(model.encoder.program)[model.main_input_name]
        sizes = [2, *(size if isinstance(size, int) else _SAMPLES for size in expected.shape[1:])]
        source = torch.randn(sizes, generator=torch.Generator().manual_seed(0)) if takes_audio(model) else ids
        inputs = {model.main_input_name: source, "decoder_input_ids": ids}
    with torch.no_grad():
        return int((model(**inputs).logits.argmax(-1) == compiled(**inputs).logits.argmax(-1)).sum())
