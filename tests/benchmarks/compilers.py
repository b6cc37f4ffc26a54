"""Programs of `lower_to_aten` in IREE on the CPU, against the converted model in torch.

    python -m tests.benchmarks.compilers [--models minilm resnet18] [--recipes float mxfp8 ...] [--repeats 9]

MiniLM (pretrained, two sentences) and ResNet-18 (random weights, two images). `SQNR` is of the first output against the
converted model's; `IREE` and `eager` are milliseconds of the processor for a batch, in turns, of one thread; `file` is
what IREE compiled. The recipe `float` is the exported model. What IREE refuses has its error in the place of figures.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import pt2mx
from tests.benchmarks.measure import Row, medians_in_turns, report
from tests.pt2e.aten.compilers import iree_module, loaded_in_iree, minilm, resnet18

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {"minilm": minilm, "resnet18": resnet18}
RECIPES = ("float", "mxfp4_weight_only", "mxfp8", "mxint8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(name, recipe, options.repeats) for name in options.models for recipe in options.recipes]
    report(rows, ["model", "recipe", "SQNR", "IREE", "eager", "file MB"])


@torch.no_grad()
def row(name: str, recipe: str, repeats: int) -> Row:
    """Return the row of a model quantized by a recipe."""
    model, inputs = MODELS[name]()
    exported = torch.export.export(model.eval(), inputs)
    if recipe == "float":
        program, subject = exported.run_decompositions(), exported.module()
    else:
        prepared = pt2mx.prepare_pt2e(exported.module(), pt2mx.MXQuantizer.from_recipe(recipe))
        prepared(*inputs)
        subject = pt2mx.convert_pt2e(prepared)
        program = pt2mx.lower_to_aten(torch.export.export(subject, inputs), weights="bytes")
    shown: Row = {"model": name, "recipe": recipe}
    try:
        binary = iree_module(program)
    except Exception as error:
        return {**shown, "SQNR": f"refused: {str(error).strip().splitlines()[0][:120]}"}
    call = loaded_in_iree(binary, "local-sync")
    want = subject(*inputs)
    sqnr = 20 * torch.log10(want.norm() / (call(*inputs) - want).norm())
    calls = partial(call, *inputs), partial(subject, *inputs)
    in_iree, eager = (1e3 * seconds for seconds in medians_in_turns(calls, repeats, clock=time.process_time))
    figures = {"SQNR": f"{sqnr:.1f}", "IREE": f"{in_iree:.1f}", "eager": f"{eager:.1f}"}
    return {**shown, **figures, "file MB": f"{len(binary) / 1e6:.1f}"}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    main()
