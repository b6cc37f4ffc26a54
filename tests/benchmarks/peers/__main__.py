"""Accuracy by this project and by its peers: the same model, calibration and held-out inputs.

    python -m tests.benchmarks.peers [--model smollm2|minilm|efficientnet-lite0|...] [--layers 4] [--formats W4 W4A4]
        [--methods pt2mx AutoRound ...] [--settings balanced hadamard ...] [--seeds 3] [--again] [--device cpu]

Each method has settings. The first table has the best setting of each by its loss on the validation inputs, with its
figures on the test inputs; the second has all settings. Below are the errors of settings that a method refuses.

Each run has a process of its own, the peers in environments in `build/peers/` that the first run makes with pip. The
scores of each window are kept in `build/peers/results/`: later calls show them and do not run the setting again, unless
`--again` is given. Delete the folder to draw other windows.

The language models have MXFP4 weights (W4), with activations in MXFP8 (W4A8) or MXFP4 (W4A4); the weights that peers
make for W4 are evaluated with W4A8, too. EfficientNet has weights of 8, 6 or 4 bits and INT8 activations; in W4A4 they
are MXFP4, in W4 float. `over pt2mx` is the mean difference from the loss of the best setting of pt2mx, window by
window, with its 95% interval over windows and seeds. The seconds and the memory are of the first seed; the seconds are
processor time, on other devices wall time.
"""

import argparse
import datetime
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.measure import Row, hardware, print_table
from tests.benchmarks.peers.evaluation import Evaluation
from tests.benchmarks.peers.methods import FOLDER, METHODS, MethodError, run_method
from tests.benchmarks.peers.models import MODELS
from tests.benchmarks.peers.outcomes import NAMES, Outcome, best, rows
from tests.benchmarks.peers.page import record
from tests.benchmarks.peers.results import Result, Results, Run

TITLES = "The best setting of each method", "All settings"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings = dict.fromkeys(setting for method in METHODS.values() for setting in method.settings)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--layers", type=int, metavar="N", help="keep the first N layers of a language model")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help="by default all of the model")
    parser.add_argument("--settings", nargs="+", choices=settings, metavar="SETTING", help="by default all")
    parser.add_argument("--formats", nargs="+", metavar="FORMAT", help="by default all formats of the model")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="run methods that draw numbers N times")
    parser.add_argument("--again", action="store_true", help="run settings that have a result")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", action="store_true", help="run nothing; add the kept results to measured.json")
    options = parser.parse_args(arguments)
    model = MODELS[options.model]
    folder = FOLDER / "results" / f"{options.model}-{options.layers or 'all'}"
    results, outcomes = Results(folder), []
    with tempfile.TemporaryDirectory() as jobs:
        evaluation = Evaluation(Path(jobs), model, options.layers, folder, options.device)
        job = {"auto": model.auto, "model_name": options.model, "device": options.device}
        for runs in _runs(options):
            for run in runs:
                if not options.record and (options.again or results.load(run) is None):
                    for measured, result in _measured(evaluation, Path(jobs), run, job):
                        results.save(measured, result)
                        print(f"{measured}: {result.refusal or 'done'}", file=sys.stderr)
            if kept := [result for run in runs if (result := results.load(run))]:
                outcomes.append(Outcome(runs[0], kept))
    complete = [outcome for outcome in outcomes if not outcome.refusal]
    chosen = best(complete, model.metric.loss)
    in_float: Row = {"format": "float", **model.metric.cells(evaluation.of_float()["test"])}
    tables = {"best": rows(chosen, chosen, model.metric), "all": rows(complete, chosen, model.metric)}
    for title, shown in zip(TITLES, tables.values(), strict=True):
        table = [in_float, *shown]
        print(f"{title}:")
        print_table(table, list(dict.fromkeys(["format", *NAMES, *(key for row in table for key in row)])))
        print()
    refusals = {str(outcome.run): outcome.refusal for outcome in outcomes if outcome.refusal}
    for run, refusal in refusals.items():
        print(f"{run} refuses: {refusal}")
    windows = len(evaluation.windows["test"])
    print(f"{options.layers or 'all'} layers, {windows} windows for the test; {hardware()}")
    if options.record:
        record(options.model, {"windows": windows, "float": in_float, **tables, "refusals": refusals})


def _runs(options: argparse.Namespace) -> Iterator[list[Run]]:
    """Return the runs of each setting that the command line chose, one for each seed."""
    for name in options.formats or MODELS[options.model].formats:
        for method, known in METHODS.items():
            chosen = method in options.methods if options.methods else options.model in known.models
            if chosen and name in (known.formats or (name,)):
                seeds = range(options.seeds if known.random else 1)
                for setting in known.settings:
                    if setting in (options.settings or known.settings):
                        yield [Run(method, setting, name, seed) for seed in seeds]


def _measured(evaluation: Evaluation, folder: Path, run: Run, job: dict[str, Any]) -> Iterator[tuple[Run, Result]]:
    """Return the result of a run, and of those that its weights serve, too.

    A result has the error of a method that cannot run or whose weights are not MXFP4.
    """
    processor = job["device"] if job["device"] == "cpu" else torch.cuda.get_device_name(job["device"])
    options = {"setting": run.setting, "options": METHODS[run.method].settings[run.setting]}
    where = processor, datetime.date.today().isoformat()
    together = METHODS[run.method].together
    runs = [run._replace(format=name) for name in (together if run.format in together else (run.format,))]
    try:
        file, cost = run_method(folder, run.method, {**job, **options, "format": run.format, "seed": run.seed})
    except MethodError as error:
        yield from ((each, Result({}, 0, 0, *where, refusal=str(error))) for each in runs)
        return
    for each in runs:
        try:
            scores = evaluation.of_result(file, each.format)
            yield each, Result(scores, cost["seconds"], cost["peak MB"], *where, rotates=cost["rotates"])
        except (ValueError, RuntimeError) as error:
            yield each, Result({}, 0, 0, *where, refusal=str(error))


if __name__ == "__main__":
    main()
