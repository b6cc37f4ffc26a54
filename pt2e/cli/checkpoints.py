"""The commands `save-checkpoint` and `convert-checkpoint`, which write checkpoints of Hugging Face."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict

from tqdm import tqdm

from pt2mx.errors import listed
from pt2mx.pt2e.checkpoints.convert_files import ConversionReport, convert_checkpoint
from pt2mx.pt2e.checkpoints.engines import sentence
from pt2mx.pt2e.checkpoints.statistics import StatisticsFile
from pt2mx.pt2e.cli.card import describe_output
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result, size_of
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.models.gguf_file import GGUFFile
from pt2mx.pt2e.models.gguf_model import gguf_in
from pt2mx.pt2e.models.pretrained import build_without_weights

#: tensors named for each reason
_NAMED = 4


def run_save(options: argparse.Namespace) -> Result:
    from pt2mx.pt2e.checkpoints.save import save_checkpoint  # imports transformers
    from pt2mx.pt2e.language.language_model import LanguageModel

    with Progress(2) as progress:
        quantized = LanguageModel.from_pretrained(options.folder)
        model = build_without_weights(options.float)  # the quantized model holds the weights
        file = gguf_in(options.float) if options.layout == "gguf" else None
        progress.begin("save")
        with user_errors(f"write {options.output!r}"):
            report = save_checkpoint(
                quantized,
                model,
                options.output,
                options.layout,
                unpack=options.unpack,
                quantized_head=options.quantized_head,
                tokenizer=file and GGUFFile(file),  # transformers does not keep all that a file says of its tokenizer
                max_shard_size=options.max_shard_size,
            )
            if options.layout != "gguf":
                describe_output(options, options.float, options.folder, engines=report.engines)
    for line in report.changes:
        note(line)
    size = size_of(options.output)
    text = [f"{options.output}: {size / 1e6:.1f} MB; {progress.seconds()}"]
    if report.engines:
        text.append(sentence(report.engines))
    fields = {"output": options.output, "bytes": size, **asdict(report), "seconds": progress.times()}
    return Result("\n".join(text), fields)


def run_convert(options: argparse.Namespace) -> Result:
    with Progress(1, "convert") as progress, tqdm(desc="shards", disable=None, file=sys.stderr) as bar:

        def finished(shard: str, shards: int) -> None:
            bar.total = shards
            bar.update()

        report = convert_checkpoint(
            options.source,
            options.output,
            options.recipe,
            layout=options.layout,
            weights=options.weights,
            dtype=options.dtype,
            quantized_head=options.quantized_head,
            statistics=None if options.statistics is None else StatisticsFile(options.statistics),
            jobs=options.jobs,
            finished=finished,
        )
    _note_unquantized(report)
    before, after = report.bytes_before, report.bytes_after
    text = [f"{spec}: {count} tensors" for spec, count in Counter(report.quantized.values()).items()]
    sizes = f"{after / 1e6:.1f} MB (the float checkpoint: {before / 1e6:.1f} MB)"
    text.append(f"{options.output}: {sizes}; {progress.seconds()}")
    if report.engines:
        text.append(sentence(report.engines))
    return Result("\n".join(text), {"output": options.output, **asdict(report), "seconds": progress.times()})


def _note_unquantized(report: ConversionReport) -> None:
    if report.kept:
        note(f"kept {len(report.kept)} shards that an earlier run had finished")
    for line in report.changes:
        note(line)
    by_reason: dict[str, list[str]] = {}
    for name, reason in report.left.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        note(f"in high precision: {listed(names, _NAMED)}: {reason}")
