"""The checkpoints that run in vLLM: a model, a layout and formats each, written by the product's commands."""

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pt2mx import MXQuantizationConfig, MXQuantizer, convert_checkpoint
from pt2mx.pt2e.checkpoints import engines
from pt2mx.pt2e.cli.command import main

_FP4, _FP6, _FP8, _NV = "mxfp4(even)", "mxfp6(even)", "mxfp8(rceil)", "nvfp4(mse)"
_TILES, _FLOAT_TILES = "fp8_e4m3{128x128}", "fp8_e4m3{128x128}(f32)"
_CT = "compressed-tensors"
#: a recipe whose rotation is folded into the weights
_FOLDED = """\
description: FP4 weights and inputs, rotated
global: {weight: mxfp4, activation: mxfp4}
operator_type: {aten.embedding: null}
algorithms: {rotation: {online: false}, gptq: {}}
"""


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Args:
        model: a name of `models`.
        layout: its layout.
        weights: the format of weights; of `commands` the recipe: its name, or YAML.
        inputs: the format of inputs; "" for high precision.
        without: a part of the names of modules that stay in high precision.
        codes_of: the layout of a first checkpoint, in MXFP4, whose codes it has; "" for none.
        head: True to ask for a quantized head where the layout has it as values.
        commands: True for `pt2mx quantize` and `pt2mx save-checkpoint`; False for what `convert-checkpoint` does.
        destined: True for `--for vllm`.
    """

    model: str
    layout: str
    weights: str
    inputs: str = ""
    without: str = ""
    codes_of: str = ""
    head: bool = False
    commands: bool = False
    destined: bool = False

    @property
    def what(self) -> str:
        """What is quantized, in words."""
        words = [self.weights if "\n" not in self.weights else "mxfp4, rotated by folding"]
        words += [f"inputs {self.inputs}"] * bool(self.inputs)
        words += [f"without {' and '.join(self.without.split('|'))}"] * bool(self.without)
        words += [f"codes of {self.codes_of}"] * bool(self.codes_of)
        words += ["head as codes"] * self.head
        words += [f"quantize{' --for vllm' * self.destined}, save-checkpoint"] * self.commands
        return ", ".join(words)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return re.sub(r"[^a-z0-9_]+", "-", f"{self.model} {self.layout} {self.what}".lower()).strip("-")


def _each(models: str, layout: str, forms: Sequence[str | tuple[str, str]], **fields: object) -> list[Case]:
    """Return a case for each model and format, or formats of weights and inputs."""
    pairs = [(form, "") if isinstance(form, str) else form for form in forms]
    case = replace(Case("", layout, ""), **fields)
    return [
        replace(case, model=model, weights=weights, inputs=inputs)
        for model in models.split()
        for weights, inputs in pairs
    ]


CASES = (
    *_each("llama qwen2 tied smollm2", _CT, [_FP4, _FP8, _NV]),
    *_each("llama", _CT, [_FP4, _FP8, _NV], without="lm_head"),
    *_each("llama", _CT, [(_FP4, _FP4), (_FP4, _FP8), (_FP8, _FP8), _FP6, (_FP6, _FP6)]),
    *_each("llama smollm2", "modelopt", [(_FP8, _FP8), _NV]),
    *_each("llama", "modelopt", [_FLOAT_TILES], head=True),
    *_each("llama", "quark", [_FP4, (_FP4, _FP4), _FP6, _FP8]),
    *_each("llama", "quark", [_FP4], head=True),
    *_each("llama", "fp8", [_FP8, _TILES, _FLOAT_TILES], without="lm_head"),
    *_each("llama", "fp8", [_TILES], head=True),
    # the product's own way, and what it writes without `--for`
    *_each("llama smollm2", _CT, ["decoder_balanced"], commands=True, destined=True),
    *_each("llama", _CT, ["decoder_smallest", "mxfp4", "nvfp4"], commands=True, destined=True),
    *_each("llama tied", _CT, [_FOLDED], commands=True, destined=True),
    *_each("llama", _CT, [_FP8], commands=True),
    # experts
    *_each("mixtral qwen3_moe", _CT, [_FP4, _FP8, _NV]),
    *_each("mixtral", _CT, [_FP6]),
    *_each("mixtral", _CT, [_FP8], without="experts"),
    *_each("qwen3_moe", _CT, ["nvfp4"], codes_of=_CT),
    *_each("mixtral qwen3_moe", "modelopt", [_NV]),
    *_each("qwen3_moe", "fp8", [_FP8, _FP4, _TILES], without="lm_head"),
    *_each("gpt_oss", "mxfp4", [_FP4]),
    *_each("gpt_oss", _CT, [_FP4, _FP8], without="experts"),
    *_each("gpt_oss", _CT, [_FP4, _FP8], without="experts|lm_head"),
    *_each("gpt_oss", _CT, ["fp4_e2m1", "nvfp4"], codes_of="mxfp4"),
    *_each("gpt_oss", "modelopt", ["nvfp4"], codes_of="mxfp4"),
    *_each("gpt_oss", "modelopt", [_NV]),
    *_each("gpt_oss", "modelopt", [_NV], without="lm_head"),
)


def write(case: Case, model: Path, folder: Path, device: str = "cpu") -> str:
    """Write the checkpoint of a case, and return what pt2mx says of it in vLLM.

    Raises:
        ValueError: where pt2mx writes no such checkpoint; the text is its reason.
    """
    if case.commands:
        return _by_commands(case, model, folder, device)
    if case.codes_of:
        first = folder.with_suffix(".first")
        convert_checkpoint(model, first, _quantizer(_FP4), layout=case.codes_of)
        report = convert_checkpoint(first, folder, layout=case.layout, weights=case.weights)
    else:
        quantizer = _quantizer(case.weights, case.inputs, case.without)
        report = convert_checkpoint(model, folder, quantizer, layout=case.layout, quantized_head=case.head)
    return report.engines[str(engines.VLLM)]


def _quantizer(weights: str, inputs: str = "", without: str = "") -> MXQuantizer:
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight=weights, activation=inputs or None))
    return quantizer.set_module_name_regex(f".*({without}).*", None) if without else quantizer


def _by_commands(case: Case, model: Path, folder: Path, device: str) -> str:
    recipe, quantized = case.weights, folder.with_suffix(".quantized")
    if "\n" in recipe:
        recipe = str(folder.with_suffix(".yaml"))
        Path(recipe).write_text(case.weights)
    destination = ["--for", "vllm"] if case.destined else []
    quantize = ["quantize", "--model", f"hf:{model}", "--recipe", recipe, *destination, "--device", device]
    _run([*quantize, "--output", str(quantized)])
    save = ["save-checkpoint", str(quantized), "--float", str(model), "--layout", case.layout]
    *_, engines_line = _run([*save, "--output", str(folder)]).splitlines()
    return engines_line.removeprefix(f"{engines.VLLM} ").partition("; ")[0]


def _run(arguments: list[str]) -> str:
    """Return what a command prints.

    Raises:
        ValueError: where it fails.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    if status:
        raise ValueError(err.getvalue().strip().splitlines()[-1])
    return out.getvalue()
