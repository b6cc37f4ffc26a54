"""ONNX files of converted models in OpenVINO on the CPU, beside float files there and beside compiled models.

    python -m tests.benchmarks.openvino [--models minilm resnet50] [--recipes mxfp4_weight_only mxfp8 ...]
        [--threads 1] [--repeats 9] [--json]

MiniLM (pretrained; 12 sentences) and ResNet-50 (random weights; 4 images of 224x224). Times are of the processor:
"start" is the seconds in which OpenVINO compiles a file; "float", "MX" and "Inductor" are the milliseconds of a batch
of the float file, of the MX file and of the converted model that Inductor compiled, in turns. "error" is the norm of
the difference of the MX file's first output from the converted model's, over the norm of that output.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import openvino
import torch
from torch.utils import _pytree as pytree

import pt2mx
from pt2mx.pt2e.cli.models import LoadedModel, load_model
from pt2mx.pt2e.onnx.export import export_onnx
from tests.benchmarks.measure import Row, hardware, medians_in_turns, print_table, timed

_HEADER = (
    "model", "recipe", "float MB", "MX MB", "float start", "MX start", "float", "MX", "Inductor", "MX / float",
    "MX / Inductor", "error",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["minilm", "resnet50"])
    parser.add_argument("--recipes", nargs="+", default=["mxfp4_weight_only", "mxfp4", "mxfp8", "mxint8"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.models:
        loaded = load_model(name if name == "minilm" else f"torchvision:{name}")
        with tempfile.TemporaryDirectory() as folder:
            rows += [_measured(name, loaded, recipe, Path(folder), options) for recipe in options.recipes]
    if options.json:
        print(json.dumps({"hardware": hardware(), "rows": rows}, indent=1))
    else:
        print_table(rows, _HEADER)
        print(f"{hardware()}, OpenVINO {openvino.__version__}")


def _measured(name: str, loaded: LoadedModel, recipe: str, folder: Path, options: argparse.Namespace) -> Row:
    quantizer = pt2mx.MXQuantizer.from_recipe(recipe)
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(loaded.export().module(), quantizer))
    files = [folder / "float.onnx", folder / "mx.onnx"]
    if not files[0].exists():
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(loaded.export(), dynamo=True, verbose=False).save(str(files[0]))
    export_onnx(converted, files[1], loaded.example, loaded.dynamic_shapes, target="openvino")
    tensors = pytree.tree_leaves(loaded.example)
    with torch.no_grad():
        compiled = torch.compile(pt2mx.lower_to_inductor(converted))
        want = pytree.tree_leaves(compiled(*tensors))[0]
        starts, calls = zip(*(_start(file, tensors, options.threads) for file in files), strict=True)
        got = calls[1]()
        times = medians_in_turns([*calls, lambda: compiled(*tensors)], options.repeats, clock=time.process_time)
    milliseconds = [1e3 * seconds for seconds in times]
    values = (
        name, recipe, *(file.stat().st_size / 1e6 for file in files), *starts, *milliseconds, times[1] / times[0],
        times[1] / times[2], f"{float((got - want).norm() / want.norm()):.1e}",
    )  # fmt: skip
    return dict(zip(_HEADER, values, strict=True))


def _start(file: Path, inputs: list[torch.Tensor], threads: int) -> tuple[float, Callable[[], torch.Tensor]]:
    """Return the seconds in which OpenVINO compiles a file, and a call of it that returns the first output."""
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    models = []
    seconds = timed(
        lambda: models.append(openvino.Core().compile_model(str(file), "CPU", settings)), clock=time.process_time
    )
    feeds = {i: x.numpy() for i, x in enumerate(inputs)}
    return seconds, lambda: torch.from_numpy(models[0](feeds)[0])


if __name__ == "__main__":
    main()
