"""The command `pt2mx perplexity`: measure the perplexity of language models, quantized and float, on a text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pt2mx.errors import MXError
from pt2mx.pt2e.cli.float_model import note_coverage
from pt2mx.pt2e.cli.language import calibration_blocks
from pt2mx.pt2e.cli.programs import load_folder
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.language.folder import is_quantized
from pt2mx.pt2e.language.language_model import LanguageModel
from pt2mx.pt2e.language.quantize import quantize_language_model
from pt2mx.pt2e.language.texts import BLOCK, Perplexity, Predict, blocks, perplexity, read_text
from pt2mx.pt2e.models.pretrained import checkpoint_values, load_language_model
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_COLUMNS = ("model", "perplexity", "KL, nats", "same argmax")


def run(options: argparse.Namespace) -> Result:
    quantizers = {name: MXQuantizer.from_recipe(name) for name in options.recipe}  # a typo should not cost a row
    quantized = is_quantized(options.folder)
    _check(options, quantized)
    with Progress(2 + 2 * len(quantizers) + (quantized and options.float is not None)) as progress:
        tokenizer = load_tokenizer(options.folder)
        text_blocks = blocks(read_text(options.text), tokenizer, options.tokens)
        source = options.float if quantized else options.folder
        model = predict_float = None
        rows: Iterable[tuple[str, Predict]] = []
        if source is not None:
            model = load_language_model(source, options.part, options.allow_partial, options.dtype)
            if not quantizers:
                note_coverage(checkpoint_values(model, source).held_by())
            predict_float = _predictions(model, use_cache=False)
            rows = [("float", predict_float)]
        if quantized:
            rows = [*rows, (Path(options.folder).name, _predictions(load_folder(options.folder)))]
        elif model is not None:
            rows = chain(rows, _by_recipes(model, quantizers, options, tokenizer, progress))
        measured: list[tuple[str, Perplexity]] = []
        for name, predict in rows:
            progress.begin(f"predict: {name}")
            reference = None if predict is predict_float else predict_float
            with user_errors(f"run {name}"):
                bar = tqdm(text_blocks, desc=name, leave=False, disable=None, file=sys.stderr)
                measured.append((name, perplexity(predict, bar, reference)))
            note(f"{name}: perplexity {measured[-1][1].perplexity:.2f}")  # kept if a long run is interrupted
    tokens = sum(block.shape[1] - 1 for block in text_blocks)
    lines = [_row(*_COLUMNS)]
    for name, row in measured:
        compared = [] if row.agreement is None else [f"{row.divergence:.4f}", f"{row.agreement:.1%}"]
        lines.append(_row(name, f"{row.perplexity:.2f}", *compared))
    lines.append(f"{tokens} tokens, predicted in blocks of {BLOCK}")
    models = [{"model": name, **asdict(row)} for name, row in measured]
    on = {"text": Path(options.text).name, "tokens": tokens, "block": BLOCK}
    return Result("\n".join(lines), {**on, "models": models, "seconds": progress.times()})


def _check(options: argparse.Namespace, quantized: bool) -> None:
    if quantized and options.recipe:
        raise MXError(f"{options.folder!r} is quantized: --recipe has no meaning")
    if not quantized and options.float:
        raise MXError(f"{options.folder!r} is a checkpoint: --float has no meaning")
    if options.dtype and quantized and options.float is None:
        raise MXError(f"{options.folder!r} is quantized: --dtype is for the checkpoint of --float; give it, too")


def _by_recipes(
    model: PreTrainedModel,
    quantizers: dict[str, MXQuantizer],
    options: argparse.Namespace,
    tokenizer: Any,
    progress: Progress,
) -> Iterator[tuple[str, Predict]]:
    """Yield the predictions of the model quantized with each recipe; quantize it when its turn comes."""
    for name, quantizer in quantizers.items():
        progress.begin(f"quantize: {name}")
        with user_errors(f"quantize by {name}"):
            calibration = calibration_blocks(options.calibration, tokenizer, quantizer)
            partial = {"part": options.part, "allow_partial": options.allow_partial}
            quantized = quantize_language_model(model, quantizer, calibration, tokenizer, **partial)
        if name == options.recipe[0]:  # the programs of all recipes hold the same
            note_coverage(checkpoint_values(model, options.folder).held_by(quantized.coverage.read))
        yield name, _predictions(quantized)


def _predictions(model: PreTrainedModel | LanguageModel, **options: bool) -> Predict:
    if model.config.is_encoder_decoder:
        raise MXError(f"a {model.config.model_type} answers a text and does not continue it: it has no perplexity")
    return lambda block: model(input_ids=block.to(model.device), **options).logits


def _row(*cells: str) -> str:
    return f"{cells[0]:<36}" + "".join(f"{cell:>14}" for cell in cells[1:])
