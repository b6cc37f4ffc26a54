"""One file, many formats: the loss of 6 and 4 bits that are sliced from an 8-bit file, over that of each format alone.

    python -m tests.benchmarks.slices [--only digits-cnn minilm ...] [--anchor mxint8] [--distill] [--json]

Weights alone are quantized. `nearest`, `balanced` and `distilled` make a model for the one format. `sliced nearest` and
`sliced balanced` slice the 8-bit models of the first two. `nested` slices `optimize(anchor=...)` of the 4-bit recipe,
and `nested, distilled` trains all formats of it together. In brackets the loss over `balanced`, or over `distilled`
where the row is trained.
"""

import argparse
import json
from collections.abc import Iterator

import torch
from torch.fx import GraphModule

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.optimize.slice import slice_graph
from tests.benchmarks.accuracy.case import Case
from tests.benchmarks.accuracy.models import MODELS
from tests.benchmarks.measure import Row, hardware, print_table

#: formats that are sliced, the widest first
NARROW = ("mxfp6", "mxfp4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=["digits-cnn", "digits-mlp"], metavar="NAME")
    parser.add_argument("--anchor", default="mxint8", help="the format of the file (default: mxint8)")
    parser.add_argument("--distill", action="store_true", help="also train, which takes minutes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tables: dict[str, list[Row]] = {}
    for name in options.only:
        tables[name] = list(rows(MODELS[name](), options.anchor, options.distill))
        if not options.json:
            print(f"\n{name}")
            print_table(tables[name], ["rounding", options.anchor, *NARROW])
    print(json.dumps({"hardware": hardware(), "models": tables}, indent=1) if options.json else f"\n{hardware()}")


def rows(case: Case, anchor: str, distill: bool) -> Iterator[Row]:
    """Measure a model in each format, alone and sliced."""
    wide, *narrow = recipes = {name: _recipe(name) for name in (anchor, *NARROW)}

    def row(rounding: str, models: list[GraphModule], over: list[float] | None = None) -> tuple[Row, list[float]]:
        losses = [case.loss(model) for model in models]
        ratios = [""] * len(losses) if over is None else [f" ({a / b:.2f}x)" for a, b in zip(losses, over, strict=True)]
        cells = {name: f"{loss:.6f}{ratio}" for name, loss, ratio in zip(recipes, losses, ratios, strict=True)}
        return {"rounding": rounding, **cells}, losses

    def sliced(model: GraphModule) -> list[GraphModule]:
        return [model, *(slice_graph(model, recipes[name]) for name in narrow)]

    def converted(model: GraphModule, name: str) -> GraphModule:
        return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, recipes[name]))

    def optimized(name: str, of: str | None = None) -> GraphModule:
        mask = case.padding_mask
        return pt2mx.optimize(case.model, recipes[name], case.batches, preset="balanced", anchor=of, padding_mask=mask)

    nearest = [converted(case.model, name) for name in recipes]
    yield row("nearest", nearest)[0]
    yield row("sliced nearest", sliced(nearest[0]))[0]
    graphs = {name: optimized(name) for name in recipes}
    balanced = [converted(graph, name) for name, graph in graphs.items()]
    alone, losses = row("balanced", balanced)
    yield alone
    yield row("sliced balanced", sliced(balanced[0]), losses)[0]
    nested = optimized(narrow[-1], anchor)
    yield row("nested", sliced(converted(nested, wide)), losses)[0]
    if not distill:
        return
    lessons = case.batches if case.lessons is None else case.lessons(case.examples)
    trained = []
    for name, graph in graphs.items():
        prepared = pt2mx.prepare_qat_pt2e(graph, recipes[name])
        trained.append(pt2mx.convert_pt2e(pt2mx.distill(prepared, case.model, lessons)))
    alone, losses = row("distilled", trained)
    yield alone
    prepared = pt2mx.prepare_qat_pt2e(nested, recipes[wide])
    slices = [pt2mx.prepare_qat_pt2e(nested, recipes[name], anchor=prepared) for name in narrow]
    pt2mx.distill(prepared, case.model, lessons, slices=slices)
    yield row("nested, distilled", sliced(pt2mx.convert_pt2e(prepared)), losses)[0]


def _recipe(name: str) -> MXQuantizer:
    """Quantize the weights of every operator, floats in the scale mode `even`."""
    spec = pt2mx.parse(name)
    spec = spec if spec.element.is_int else spec.replace(scale_mode="even")
    return MXQuantizer().set_global(MXQuantizationConfig(weight=spec))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
