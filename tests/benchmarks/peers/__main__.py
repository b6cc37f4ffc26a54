"""Accuracy by this project and by its peers: the same model, calibration and held-out inputs.

    python -m tests.benchmarks.peers [--model smollm2|minilm|efficientnet] [--layers 4] [--formats W4 W4A4]
        [--methods balanced AutoRound ...] [--again] [--device cpu]

Each method runs in a process of its own, the peers in environments in `build/peers/` that the first run makes with pip.
The scores of each window are kept in `build/peers/results/`: later runs show them and do not run the method again,
unless `--again` is given. Delete the folder to draw other windows.

The language models have MXFP4 weights (W4), with activations in MXFP8 (W4A8) or MXFP4 (W4A4); the peers round W4A8 as
W4. EfficientNet has weights of 8, 6 or 4 bits and INT8 activations. `over balanced` is the mean difference from the
loss of `balanced`, window by window, with its 95% interval. The seconds are processor time, on other devices wall time.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.benchmarks.measure import Row, hardware, print_table
from tests.benchmarks.peers.evaluation import Evaluation
from tests.benchmarks.peers.figures import Metric, difference_text
from tests.benchmarks.peers.methods import FOLDER, METHODS, MethodError, run_method
from tests.benchmarks.peers.models import MODELS
from tests.benchmarks.peers.results import Result, Results

#: the method that others are compared with
OURS = "balanced"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--layers", type=int, metavar="N", help="keep the first N layers of a language model")
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help="by default all of the model")
    parser.add_argument("--formats", nargs="+", metavar="FORMAT", help="by default all formats of the model")
    parser.add_argument("--again", action="store_true", help="run methods that have a result")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    model = MODELS[options.model]
    methods = options.methods or [name for name, method in METHODS.items() if options.model in method.models]
    folder = FOLDER / "results" / f"{options.model}-{options.layers or 'all'}"
    results, errors = Results(folder), []
    with tempfile.TemporaryDirectory() as jobs:
        evaluation = Evaluation(Path(jobs), model, options.layers, folder, options.device)
        rows: list[Row] = [{"format": "float", "method": "", **model.metric.cells(evaluation.of_float())}]
        job = {"auto": model.auto, "model_name": options.model, "device": options.device}
        for name in options.formats or model.formats:
            chosen = [method for method in methods if name in (METHODS[method].formats or (name,))]
            for method in chosen:
                if options.again or results.load(method, name) is None:
                    try:
                        results.save(method, name, _measured(evaluation, Path(jobs), method, {**job, "format": name}))
                        print(f"{name}, {method}: done", file=sys.stderr)
                    except MethodError as error:
                        errors.append(f"{name}, {method}: {error}")
            rows += _rows(results, model.metric, chosen, name)
    print_table(rows, list(dict.fromkeys(key for row in rows for key in row)))
    print("", *errors, sep="\n")
    print(f"{options.layers or 'all'} layers, {len(evaluation.windows)} windows held out; {hardware()}")


def _measured(evaluation: Evaluation, folder: Path, method: str, job: dict[str, str]) -> Result:
    """Run a method and return its result.

    Raises:
        MethodError: for a method that cannot run, or whose weights are not MXFP4.
    """
    file, cost = run_method(folder, method, job)
    try:
        scores = evaluation.of_result(file, job["format"])
    except (ValueError, RuntimeError) as error:
        raise MethodError(str(error)) from error
    processor = job["device"] if job["device"] == "cpu" else torch.cuda.get_device_name(job["device"])
    return Result(scores, cost["seconds"], cost["peak MB"], processor, datetime.date.today().isoformat())


def _rows(results: Results, metric: Metric, methods: list[str], name: str) -> Iterator[Row]:
    """Return the rows of a format, of the methods that have a result."""
    ours = results.load(OURS, name)
    for method in methods:
        if (result := results.load(method, name)) is not None:
            row: Row = {"format": name, "method": method, **metric.cells(result.scores)}
            if ours is not None and method != OURS:
                row[f"over {OURS}"] = difference_text(result.scores[metric.loss], ours.scores[metric.loss])
            cost = {"seconds": f"{result.seconds:.0f}", "peak MB": f"{result.peak:.0f}"}
            yield {**row, **cost, "on": f"{result.processor}, {result.day}"}


if __name__ == "__main__":
    main()
