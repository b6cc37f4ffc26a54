"""Accuracy at 4 bits on pretrained weights: rounded to nearest, by the presets of `pt2mx.optimize`, and distilled.

    python -m tests.benchmarks.accuracy [--only minilm crepe-tiny ...] [--presets balanced distilled folded ...]
        [--formats W4 "NVFP4 W4" ...] [--device cuda]
        [--examples 8192] [--rate 1e-4] [--held-out 8] [--json]

One table per model; a separate process measures each. `loss` is the loss of the format (1 - cosine, the KL
divergence, or the word error rate), followed by its ratio to the loss of rounding to nearest with two scale modes. Then
come the seconds until the model is quantized or distilled, and the peak memory of the process. Each model's file
describes the data for calibration and evaluation.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from pt2mx.pt2e.optimize.optimize import PRESETS
from tests.benchmarks.accuracy.case import ALGORITHMS, DISTILLED
from tests.benchmarks.accuracy.models import MODELS, rows
from tests.benchmarks.accuracy.packages import NotInstalledError
from tests.benchmarks.measure import Row, hardware, print_table

ROUNDINGS = (*PRESETS, DISTILLED)
#: rows of decoders, which the command measures only where `--presets` names them
OF_DECODERS = tuple(ALGORITHMS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument(
        "--presets", nargs="+", choices=(*ROUNDINGS, *OF_DECODERS), default=list(ROUNDINGS), metavar="PRESET"
    )
    parser.add_argument("--formats", nargs="+", metavar="FORMAT", help="by default the formats of each model")
    parser.add_argument("--device", default="cpu", help="where models run and are trained (default: cpu)")
    parser.add_argument("--examples", type=int, help="number of examples for distillation, by default the model's")
    parser.add_argument("--rate", type=float, help="learning rate of distillation, by default the model's")
    parser.add_argument("--held-out", type=int, help="number of blocks of text of smollm2, by default 48")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    changes = {key: value for key in ("examples", "rate", "held_out") if (value := getattr(options, key)) is not None}
    found: dict[str, list[Row]] = {}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for name in options.only:
            try:
                found[name] = processes.submit(
                    rows, name, options.presets, options.formats, options.device, **changes
                ).result()
            except NotInstalledError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            if not options.json:
                print(f"\n{name}")
                print_table(found[name], list(dict.fromkeys(key for row in found[name] for key in row)))
    print(json.dumps({"hardware": hardware(), "models": found}, indent=1) if options.json else f"\n{hardware()}")


if __name__ == "__main__":
    main()
