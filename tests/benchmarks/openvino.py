"""ONNX files of converted models in OpenVINO on the CPU, against float files there and against compiled models.

    python -m tests.benchmarks.openvino [--models minilm resnet50] [--recipes mxfp4_weight_only mxfp8 ...]
        [--threads 1] [--repeats 9] [--json]

MiniLM (pretrained; 12 sentences), ResNet-50 (random weights; 4 images of 224x224), and a token of SmolLM2-135M with a
past of 128 tokens, where its package is installed and `--models smollm2` asks for it (by `generate` in the column
"Inductor"; "error" is of the logits). Times are of the processor:
"start" is the seconds in which OpenVINO compiles a file; "float", "MX" and "Inductor" are the milliseconds of a batch
of the float file, of the MX file and of the converted model that Inductor compiled, in turns. "error" is the norm of
the difference of the MX file's first output from the converted model's, over the norm of that output.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import pt2mx
from pt2mx import LanguageModel, export_onnx
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.float_model import export_loaded
from pt2mx.pt2e.language.decoder import export_decoder
from pt2mx.pt2e.models.float_models import load_model
from pt2mx.pt2e.models.packaged import smollm2_checkpoint
from pt2mx.pt2e.models.pretrained import load_language_model
from pt2mx.pt2e.onnx.decoder import decoder_of
from tests.benchmarks.measure import Row, medians_in_turns, report, timed

#: tokens before the one that is timed, and generated tokens of the compiled model
_PAST, _TOKENS = 128, 16
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
        with tempfile.TemporaryDirectory() as folder:
            rows += [_measured(name, recipe, Path(folder), options) for recipe in options.recipes]
    report(rows, _HEADER, options.json)
    if not options.json:
        print(f"OpenVINO {import_extra('openvino', 'openvino').__version__}")


class _Sides(NamedTuple):
    """The inputs of both files, the first output of the converted model, and calls of the compiled one: seconds are the
    difference of the first two calls, over a number of tokens."""

    inputs: list[Tensor]
    expected: Tensor
    compiled: Sequence[Callable[[], object]]
    tokens: int


def _measured(name: str, recipe: str, folder: Path, options: argparse.Namespace) -> Row:
    files = [folder / "float.onnx", folder / "mx.onnx"]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        sides = _decoder(recipe, *files) if name == "smollm2" else _encoder(name, recipe, *files)
        starts, calls = zip(*(_start(file, sides.inputs, options.threads) for file in files), strict=True)
        got, want = calls[1](), sides.expected
        *times, whole, start = medians_in_turns([*calls, *sides.compiled], options.repeats, clock=time.process_time)
    times.append((whole - start) / sides.tokens)
    values = (
        name, recipe, *(file.stat().st_size / 1e6 for file in files), *starts, *(1e3 * seconds for seconds in times),
        times[1] / times[0], times[1] / times[2], f"{float((got - want).norm() / want.norm()):.1e}",
    )  # fmt: skip
    return dict(zip(_HEADER, values, strict=True))


def _encoder(name: str, recipe: str, float_file: Path, file: Path) -> _Sides:
    loaded = load_model(name if name == "minilm" else f"torchvision:{name}")
    quantizer = pt2mx.MXQuantizer.from_recipe(recipe)
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(export_loaded(loaded).module(), quantizer))
    if not float_file.exists():
        torch.onnx.export(export_loaded(loaded), dynamo=True, verbose=False).save(str(float_file))
    export_onnx(converted, file, loaded.example, loaded.dynamic_shapes, target="openvino")
    inputs = pytree.tree_leaves(loaded.example)
    compiled = torch.compile(pt2mx.lower_to_inductor(converted))
    return _Sides(inputs, pytree.tree_leaves(compiled(*inputs))[0], (lambda: compiled(*inputs), lambda: None), 1)


def _decoder(recipe: str, float_file: Path, file: Path) -> _Sides:
    model = load_language_model(str(smollm2_checkpoint()))
    if not float_file.exists():
        decoder = decoder_of(LanguageModel(export_decoder(model), model.config))
        exported = torch.export.export(decoder.graph, (), decoder.example, dynamic_shapes=decoder.shapes)
        torch.onnx.export(exported, dynamo=True, verbose=False).save(str(float_file))
    quantizer = pt2mx.MXQuantizer.from_recipe(recipe).set_algorithms(None)
    quantized = pt2mx.quantize_language_model(model, quantizer)
    export_onnx(quantized, file, target="openvino")
    torch.manual_seed(0)
    ids = torch.randint(1000, (1, _PAST + 1))
    decoder = decoder_of(quantized)
    no_past = pytree.tree_map(lambda x: x[:1, :, :0], decoder.example["past_key_values"])
    _, *before = pytree.tree_leaves(decoder.graph(ids[:, :-1], torch.ones_like(ids[:, :-1]), no_past))
    inputs = [ids[:, -1:], torch.ones_like(ids), *before]
    expected = quantized(ids).logits[:, -1:]
    quantized.compile()
    calls = [lambda n=n: quantized.generate(ids, max_new_tokens=n, do_sample=False) for n in (_TOKENS + 1, 1)]
    return _Sides(inputs, expected, calls, _TOKENS)


def _start(file: Path, inputs: list[Tensor], threads: int) -> tuple[float, Callable[[], Tensor]]:
    """Return the seconds in which OpenVINO compiles a file, and a call of it that returns the first output."""
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    core, models = import_extra("openvino", "openvino").Core(), []
    seconds = timed(lambda: models.append(core.compile_model(str(file), "CPU", settings)), clock=time.process_time)
    feeds = {i: x.numpy() for i, x in enumerate(inputs)}
    return seconds, lambda: torch.from_numpy(models[0](feeds)[0])


if __name__ == "__main__":
    main()
