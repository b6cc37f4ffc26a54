"""ONNX files of converted models against files of float models, in onnxruntime on the CPU.

    python -m tests.benchmarks.onnx [--models mlp minilm resnet18 resnet50] [--recipes mxfp4 mxfp4_weight_only mxfp8]
        [--threads 1] [--repeats 5] [--json]

MiniLM (pretrained; 12 sentences), ResNet (random weights; 4 images of 224x224) and an MLP of three layers (random
weights; 8 rows), exported with a dynamic batch. "start" is the median processor time until a session can run, in which
onnxruntime optimizes the graph and decodes weights; "batch" is
the median time of a batch, both files in turns. "nodes" counts the nodes of the domain pt2mx. "bits" counts their
output values that differ from the results of pt2mx's operators for the same inputs. "difference" is the largest
difference of the outputs from the converted model's, over the largest output.

Reach: files of 0.15x (MXFP4) and 0.28x (MXFP8) of the float ones, a start of MiniLM within 3x, a batch of 4x the float
time.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import onnx
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pt2mx
from pt2mx.pt2e.cli.float_model import export_loaded
from pt2mx.pt2e.models.float_models import LoadedModel, load_model
from pt2mx.pt2e.onnx.export import export_onnx
from tests.benchmarks.measure import Row, medians_in_turns, report
from tests.onnx_nodes import differences, session

_HEADER = (
    "model", "recipe", "float MB", "MX MB", "size", "float start s", "MX start s", "start", "float batch ms",
    "MX batch ms", "time", "nodes", "bits", "difference",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "minilm", "resnet18", "resnet50"])
    parser.add_argument("--recipes", nargs="+", default=["mxfp4", "mxfp4_weight_only", "mxfp8"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for name in args.models:
        loaded = _mlp() if name == "mlp" else load_model(name if name == "minilm" else f"torchvision:{name}")
        with tempfile.TemporaryDirectory() as folder:
            rows += [_measured(name, loaded, recipe, Path(folder), args) for recipe in args.recipes]
    report(rows, _HEADER, args.json)


def _measured(name: str, loaded: LoadedModel, recipe: str, folder: Path, args: argparse.Namespace) -> Row:
    exported = export_loaded(loaded).module()
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe(recipe)))
    files = [str(folder / "float.onnx"), str(folder / "mx.onnx")]
    if not Path(files[0]).exists():
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(export_loaded(loaded), dynamo=True, verbose=False).save(files[0])
    export_onnx(converted, files[1], loaded.example, loaded.dynamic_shapes)
    turns = [[_start(file, args.threads) for file in files] for _ in range(args.repeats)]
    starts = [median(times) for times in zip(*turns, strict=True)]
    sessions = [session(file, args.threads) for file in files]
    inputs = [x.numpy() for x in pytree.tree_leaves(loaded.example)]
    feeds = dict(zip([value.name for value in sessions[1].get_inputs()], inputs, strict=True))
    float_feeds = dict(zip([value.name for value in sessions[0].get_inputs()], inputs, strict=True))
    calls = [lambda: sessions[0].run(None, float_feeds), lambda: sessions[1].run(None, feeds)]
    times = medians_in_turns(calls, args.repeats)
    different = differences(onnx.load(files[1]), feeds)
    with torch.no_grad():
        want = pytree.tree_leaves(converted(*pytree.tree_leaves(loaded.example)))[0]
    got = torch.from_numpy(sessions[1].run(None, feeds)[0])
    megabytes = [Path(file).stat().st_size / 1e6 for file in files]
    values = (
        name, recipe, *megabytes, megabytes[1] / megabytes[0], *starts, starts[1] / starts[0],
        *(1e3 * t for t in times), times[1] / times[0], len(different), sum(different.values()), _difference(got, want),
    )  # fmt: skip
    return dict(zip(_HEADER, values, strict=True))


def _start(file: str, threads: int) -> float:
    """Return the processor seconds until a session can run."""
    begin = time.process_time()
    session(file, threads)
    return time.process_time() - begin


def _mlp() -> LoadedModel:
    torch.manual_seed(0)
    layers = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
    return LoadedModel(nn.Sequential(*layers).eval(), (torch.randn(8, 64),), ({0: torch.export.Dim("batch")},))


def _difference(got: Tensor, want: Tensor) -> str:
    return f"{float((got - want).abs().max() / want.abs().max()):.1e}"


if __name__ == "__main__":
    main()
