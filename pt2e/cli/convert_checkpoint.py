"""The command `pt2mx convert-checkpoint`: a float checkpoint becomes a quantized one, without its model."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict

from tqdm import tqdm

from pt2mx.pt2e.checkpoints.convert_files import ConversionReport, convert_checkpoint
from pt2mx.pt2e.checkpoints.statistics import StatisticsFile
from pt2mx.pt2e.cli.progress import Progress, note
from pt2mx.pt2e.cli.result import Result

#: tensors that are named for each reason
_NAMED = 4


def run(options: argparse.Namespace) -> Result:
    with Progress(1, "convert") as progress, tqdm(desc="shards", disable=None, file=sys.stderr) as bar:

        def finished(shard: str, shards: int) -> None:
            bar.total = shards
            bar.update()

        report = convert_checkpoint(
            options.source,
            options.output,
            options.recipe,
            layout=options.layout,
            dtype=options.dtype,
            statistics=None if options.statistics is None else StatisticsFile(options.statistics),
            jobs=options.jobs,
            finished=finished,
        )
    _note_left(report)
    before, after = report.bytes_before, report.bytes_after
    formats = Counter(report.quantized.values())
    text = [
        *(f"{spec}: {count} tensors" for spec, count in formats.items()),
        f"{options.output}: {after / 1e6:.1f} MB (the float checkpoint: {before / 1e6:.1f} MB); {progress.seconds()}",
    ]
    return Result("\n".join(text), {"output": options.output, **asdict(report), "seconds": progress.times()})


def _note_left(report: ConversionReport) -> None:
    if report.kept:
        note(f"kept {len(report.kept)} shards that an earlier run had finished")
    by_reason: dict[str, list[str]] = {}
    for name, why in report.left.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        note(f"in high precision: {', '.join(names[:_NAMED])}{more}: {why}")
