"""Quantization-aware training of an 8-bit model together with its slices, on scikit-learn's digits.

    python -m tests.benchmarks.qat_slices [--seeds 5] [--models cnn vit] [--formats mxint8 mxfp6 mxfp4] [--json]

Weights and activations of every operator are in one format. The first format is that of the file, the others are sliced
from it. Cross-entropy and accuracy on the held-out third, means over the seeds: of a model that is trained for each
format `alone`, of slices of the 8-bit one of these (`sliced`), and of slices of a file that is trained with them
(`together`). `over alone` is the ratio of the mean losses of `together` and `alone`.

Reach: at most 1.1 at 4 bits.
"""

import argparse
import copy
import json
import sys
from collections import defaultdict

import torch
from torch.fx import GraphModule
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import pt2mx
from pt2mx import MXQuantizer
from pt2mx.pt2e.optimize.slice import slice_graph
from tests.benchmarks import qat
from tests.benchmarks.measure import Row, hardware, print_table

#: (cross-entropy, percent of right answers) of each seed, by row and format
Figures = dict[tuple[str, str], list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=qat.MODELS, default=["cnn"])
    parser.add_argument(
        "--formats", nargs="+", default=["mxint8", "mxfp6", "mxfp4"], help="the format of the file first"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tables: dict[str, list[Row]] = {}
    for name in options.models:
        figures: Figures = defaultdict(list)
        for seed in tqdm(range(options.seeds), desc=name, disable=None, file=sys.stderr):
            run(name, seed, options.formats, figures)
        tables[name] = table(figures, options.formats)
        if not options.json:
            print(f"\n{name}, {options.seeds} seeds")
            print_table(tables[name], list(tables[name][0]))
    print(json.dumps({"hardware": hardware(), "models": tables}, indent=1) if options.json else f"\n{hardware()}")


def run(name: str, seed: int, formats: list[str], figures: Figures) -> None:
    """Train with one seed, which also splits the images, and add the figures of each row and format."""
    digits = qat.load(seed)
    torch.manual_seed(seed)
    model = qat.MODELS[name]()
    before, after = qat.SCHEDULES[name]
    qat.train(model, digits, before)
    recipes = [_recipe(spelling) for spelling in formats]

    def add(row: str, models: list[GraphModule]) -> None:
        for spelling, one in zip(formats, models, strict=True):
            figures[row, spelling].append(_figures(one, digits))

    def trained(quantizer: MXQuantizer, others: list[MXQuantizer]) -> GraphModule:
        exported = qat.exported(copy.deepcopy(model).train())
        prepared = pt2mx.prepare_qat_pt2e(exported, quantizer)
        slices = [pt2mx.prepare_qat_pt2e(exported, other, anchor=prepared) for other in others]
        torch.manual_seed(seed)
        qat.train(prepared, digits, after, slices)
        return pt2mx.convert_pt2e(prepared)

    def sliced(file: GraphModule) -> list[GraphModule]:
        return [file, *(slice_graph(file, recipe) for recipe in recipes[1:])]

    alone = [trained(recipe, []) for recipe in recipes]
    add("alone", alone)
    add("sliced", sliced(alone[0]))
    add("together", sliced(trained(recipes[0], recipes[1:])))


def table(figures: Figures, formats: list[str]) -> list[Row]:
    """Return a row for each format."""
    rows: list[Row] = []
    for spelling in formats:
        means = {
            row: torch.tensor(figures[row, spelling], dtype=torch.float64).mean(0).tolist()
            for row in ("alone", "sliced", "together")
        }
        cells = {row: f"{loss:.4f}, {right:.1f}%" for row, (loss, right) in means.items()}
        rows.append({"format": spelling, **cells, "over alone": f"{means['together'][0] / means['alone'][0]:.2f}"})
    return rows


@torch.no_grad()
def _figures(model: GraphModule, digits: qat.Digits) -> tuple[float, float]:
    images, labels = digits.test
    return cross_entropy(model(images), labels).item(), qat.accuracy(model, digits)


def _recipe(spelling: str) -> MXQuantizer:
    return MXQuantizer().set_global(pt2mx.get_default_mx_quantization_config(spelling, spelling))


if __name__ == "__main__":
    main()
