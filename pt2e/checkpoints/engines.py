"""The engines that load checkpoints, and what happened when they ran on each layout.

`READINGS` is data: one row for the weights that engines treat alike. A cell says that the engine loaded them, that it
did not, or that it did not run. What has no row did not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pt2mx.pt2e.models.checkpoint_names import fused_with
from pt2mx.pt2e.models.layouts import Layout
from pt2mx.pt2e.models.module_schemes import EMBEDDING, EXPERTS, LINEAR, Module, Scheme, is_transposed, weights_of
from pt2mx.pt2e.models.weight_formats import FP8_BLOCKS, NVFP4, NVFP4_DIVISOR

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Engine:
    """A library that loads checkpoints, in the version that ran.

    Args:
        name, version: the library.
        where: the month and the machine.
        fuses: True where it multiplies the weights of `fused_with` at once, in one format.
        families: the `model_type`s that it ran with; empty where the suite runs it with many.
    """

    name: str
    version: str
    where: str
    fuses: bool = False
    families: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


_FAMILIES = frozenset({"llama", "qwen2", "mixtral", "qwen3_moe", "gpt_oss"})
VLLM = Engine("vLLM", "0.26.0", "2026-11, NVIDIA H200", fuses=True, families=_FAMILIES)
TRANSFORMERS = Engine("transformers", "5.24.0", "2026-11, CPU")
#: in the order of the table
ENGINES = (VLLM, TRANSFORMERS)


@dataclass(frozen=True)
class Reading:
    """The result of loading weights with an engine.

    Args:
        loads: True or False where it ran; None: it did not run.
        text: its kernel, or the reason why it does not load them.
        inputs: what it does with inputs, where that is not what the checkpoint says.
    """

    loads: bool | None = None
    text: str = ""
    inputs: str = ""

    def __str__(self) -> str:
        words = {True: "yes", False: "**no**", None: "not run"}[self.loads]
        return words + f": {self.text}" * bool(self.text) + f"; {self.inputs}" * bool(self.inputs)


#: parts of a model that engines treat differently, next to the kinds of modules: the head; a head that vLLM builds in
#: high precision, of gpt-oss and of others; experts that a model has in one tensor and a checkpoint as linear layers;
#: experts whose tensor scale is 1; layers whose inputs are rotated as the model runs (`transform_config`)
HEAD, GPT_OSS_HEAD, FLOAT_HEAD = "Head", "Head of gpt-oss", "Head in high precision"
SPLIT, UNIT = "Split experts", "Experts with tensor scale 1"
ROTATED, ROTATED_HEAD = "Rotated inputs", "Rotated inputs of the head"
_PARTS = {
    LINEAR: "linear layers",
    HEAD: "the head",
    GPT_OSS_HEAD: "the head of gpt-oss",
    FLOAT_HEAD: "the head of Bloom, Jamba, Mamba, OPT, Qwen3-Next and others",
    EMBEDDING: "the embedding",
    EXPERTS: "experts",
    UNIT: "experts with a tensor scale of 1",
    SPLIT: "experts of gpt-oss as linear layers",
    ROTATED: "linear layers with rotated inputs",
    ROTATED_HEAD: "the head with rotated inputs",
}
#: `model_type` -> its head: gpt-oss ran, of the others vLLM's code was read
_HEADS = {
    "gpt_oss": GPT_OSS_HEAD,
    **dict.fromkeys(("bloom", "chameleon", "falcon_h1", "jamba", "mamba", "mamba2"), FLOAT_HEAD),
    **dict.fromkeys(("opt", "plamo2", "plamo3", "qwen3_next", "step3_text", "zamba2"), FLOAT_HEAD),
}
_NOT_RUN, _YES = Reading(), Reading(True)
_ONE_TENSOR = "its loader takes one tensor a layer"
_AS_MODELOPT = Reading(False, "it takes them for ModelOpt's MXFP8")
_FLOAT_HEAD = Reading(None, "its code has heads in high precision alone")
_GPT_OSS_HEAD = Reading(False, "it has this head in high precision")
_READ_HEAD = Reading(None, "its code has this head in high precision")
_EXPERTS = Reading(True, "Marlin experts")
_UNROTATED = Reading(False, "it leaves `transform_config` out, so that values are wrong")
_READ_ROTATION = Reading(None, "its code rotates them on one GPU, for layers without a bias")
_READ_ROTATED_HEAD = Reading(None, "its code rotates no inputs of heads")
_ROUNDS = "it rounds inputs to FP8"


def _marlin(kernel: str) -> Reading:
    return Reading(True, kernel, "inputs stay in high precision on Hopper")


@dataclass(frozen=True)
class Row:
    """The readings of weights.

    Args:
        layout: the name of the layout.
        part: a key of `_PARTS`.
        forms: the formats of weights.
        readings: in the order of `ENGINES`.
    """

    layout: str
    part: str
    forms: tuple[str, ...]
    readings: tuple[Reading, ...]


_CT, _FP4, _FP6, _FP8 = "compressed-tensors", "fp4_e2m1", "fp6_e2m3", "fp8_e4m3"
_TILES, _FLOAT_TILES = "fp8_e4m3{128x128}", FP8_BLOCKS

READINGS = (
    Row(_CT, LINEAR, (_FP4,), (_marlin("MarlinMxFp4"), _YES)),
    Row(_CT, LINEAR, (_FP8,), (_marlin("MarlinMxfp8"), _YES)),
    Row(_CT, LINEAR, (NVFP4_DIVISOR,), (_marlin("MarlinNvFp4"), _YES)),
    Row(_CT, LINEAR, (_FP6,), (Reading(False, "its compressed-tensors 0.17 takes 8 bits alone"), _YES)),
    Row(_CT, HEAD, (_FP4,), (_marlin("MarlinMxFp4"), _YES)),
    Row(_CT, HEAD, (_FP8,), (_marlin("MarlinMxfp8"), _YES)),
    Row(_CT, HEAD, (NVFP4_DIVISOR,), (_marlin("MarlinNvFp4"), _YES)),
    Row(_CT, HEAD, (_FP6,), (_NOT_RUN, _YES)),
    Row(_CT, GPT_OSS_HEAD, (_FP4, _FP8, NVFP4_DIVISOR, _FP6), (_GPT_OSS_HEAD, _YES)),
    Row(_CT, FLOAT_HEAD, (_FP4, _FP8, NVFP4_DIVISOR, _FP6), (_READ_HEAD, _YES)),
    Row(_CT, EMBEDDING, (_FP8,), (Reading(False, "it has embeddings in integers or high precision"), _YES)),
    Row(_CT, EXPERTS, (_FP4,), (_EXPERTS, _YES)),
    Row(_CT, EXPERTS, (_FP6,), (_NOT_RUN, _YES)),
    Row(_CT, EXPERTS, (_FP8,), (_EXPERTS, Reading(False, "it takes one scale a row"))),
    Row(_CT, EXPERTS, (NVFP4_DIVISOR,), (_EXPERTS, Reading(False, "its values are wrong: it ignores tensor scales"))),
    Row(_CT, UNIT, (NVFP4_DIVISOR,), (_EXPERTS, _YES)),
    Row(_CT, SPLIT, (_FP4, NVFP4_DIVISOR), (Reading(False, _ONE_TENSOR), _NOT_RUN)),
    Row(_CT, SPLIT, (_FP6, _FP8), (Reading(None, _ONE_TENSOR), _NOT_RUN)),
    Row(_CT, ROTATED, (_FP4, _FP6, _FP8, NVFP4_DIVISOR), (_READ_ROTATION, _UNROTATED)),
    Row(_CT, ROTATED_HEAD, (_FP4, _FP6, _FP8, NVFP4_DIVISOR), (_READ_ROTATED_HEAD, _UNROTATED)),
    Row("mxfp4", EXPERTS, (_FP4,), (Reading(True, "Triton experts"), _YES)),
    Row("quark", LINEAR, (_FP4, _FP6), (Reading(True, "emulated, with amd-quark"), _NOT_RUN)),
    Row("quark", LINEAR, (_FP8,), (Reading(False, "it has no scheme for them"), _NOT_RUN)),
    Row("quark", HEAD, (_FP4, _FP6, "fp6_e3m2", _FP8), (Reading(False, "it has heads in high precision"), _NOT_RUN)),
    Row("modelopt", LINEAR, (_FP8,), (_marlin("MarlinMxfp8"), _NOT_RUN)),
    Row("modelopt", LINEAR, (NVFP4,), (_marlin("MarlinNvFp4"), _NOT_RUN)),
    Row("modelopt", HEAD, (_FP8,), (_marlin("MarlinMxfp8"), _NOT_RUN)),
    Row("modelopt", HEAD, (NVFP4,), (_marlin("MarlinNvFp4"), _NOT_RUN)),
    Row("modelopt", HEAD, (_FLOAT_TILES,), (Reading(False, _FLOAT_HEAD.text), _NOT_RUN)),
    Row("modelopt", GPT_OSS_HEAD, (NVFP4,), (_GPT_OSS_HEAD, _NOT_RUN)),
    Row("modelopt", GPT_OSS_HEAD, (_FP8,), (Reading(None, _GPT_OSS_HEAD.text), _NOT_RUN)),
    Row("modelopt", FLOAT_HEAD, (_FP8, NVFP4), (_READ_HEAD, _NOT_RUN)),
    Row("modelopt", EXPERTS, (NVFP4,), (_EXPERTS, _NOT_RUN)),
    Row("modelopt", SPLIT, (NVFP4,), (Reading(False, _ONE_TENSOR), _NOT_RUN)),
    Row("fp8", LINEAR, (_FP8,), (_AS_MODELOPT, _YES)),
    Row("fp8", HEAD, (_FP8,), (_AS_MODELOPT, _YES)),
    Row("fp8", LINEAR, (_TILES,), (Reading(True, "Cutlass", _ROUNDS), _YES)),
    Row("fp8", LINEAR, (_FLOAT_TILES,), (Reading(True, "Cutlass", _ROUNDS), _YES)),
    Row("fp8", LINEAR, (_FP4,), (Reading(False, "it expects weights of another shape"), _NOT_RUN)),
    Row("fp8", HEAD, (_TILES,), (Reading(False, _FLOAT_HEAD.text), _NOT_RUN)),
    Row("fp8", HEAD, (_FLOAT_TILES,), (_FLOAT_HEAD, _NOT_RUN)),
    Row("fp8", EXPERTS, (_FP8,), (_AS_MODELOPT, _YES)),
    Row("fp8", EXPERTS, (_FP4,), (_NOT_RUN, _YES)),
    Row("fp8", EXPERTS, (_TILES,), (Reading(True, "Triton experts", _ROUNDS), _NOT_RUN)),
)


def readings_of(layout: str, part: str, form: str) -> tuple[Reading, ...]:
    """Return the readings of weights, in the order of `ENGINES`.

    Args:
        layout: the name of a layout.
        part: a kind of modules, or another key of `_PARTS`. A head without a row is read like any other.
        form: a format of weights.
    """
    parts = (part, HEAD) if part in (GPT_OSS_HEAD, FLOAT_HEAD) else (part,)
    rows = (row for name in parts for row in READINGS if (row.layout, row.part) == (layout, name) and form in row.forms)
    return next((row.readings for row in rows), (_NOT_RUN,) * len(ENGINES))


def loads(engine: Engine, layout: str, part: str, form: str) -> bool | None:
    """Return whether an engine loads weights; None: it did not run with them. As `readings_of`."""
    return readings_of(layout, part, form)[ENGINES.index(engine)].loads


def is_refused(layout: str, part: str, form: str) -> bool:
    """Return whether an engine does not load weights, and none is known to load them."""
    loads = {reading.loads for reading in readings_of(layout, part, form)}
    return False in loads and True not in loads


def engines_that_load(
    layout: Layout, modules: Mapping[str, Module], model: PreTrainedModel, unit_scales: bool = False
) -> dict[str, str]:
    """Return what each engine is known to do with a checkpoint.

    Args:
        layout: its layout.
        modules: its modules by their names in the model, the head marked; other names are ignored.
        model: the model, on any device, also meta.
        unit_scales: True where the tensor scales of experts are 1.

    Returns:
        Engine with its version -> a predicate, such as "loads it"; empty for a layout that none ran with (GGUF).
    """
    if layout.name not in {row.layout for row in READINGS}:
        return {}
    of_weights = {weight: modules.get(weight.rpartition(".")[0]) for weight in weights_of(model)}
    schemes = {weight: None if module is None else module.scheme for weight, module in of_weights.items()}
    parts = {
        (_part(layout, module, model, weight, unit_scales), module.scheme.form): None
        for weight, module in of_weights.items()
        if module is not None and module.scheme is not None
    }
    parts |= {
        (ROTATED_HEAD if module.is_head else ROTATED, module.scheme.form): None
        for module in modules.values()
        if module.scheme is not None and module.rotated
    }
    any_inputs = not layout.inputs or any(scheme and scheme.inputs for scheme in schemes.values())
    mixed, family = _fused_in_several(schemes), model.config.model_type
    predicates = {}
    for i, engine in enumerate(ENGINES):
        untried = []
        if engine.families and family not in engine.families:
            untried.append(f"the architecture {family}")
        if engine.fuses and mixed:
            untried.append(f"{', '.join(mixed)} in several formats (its code takes one)")
        readings = {part: readings_of(layout.name, *part)[i] for part in parts}
        predicates[str(engine)] = _predicate(readings, any_inputs, untried)
    return predicates


def _part(layout: Layout, module: Module, model: PreTrainedModel, weight: str, unit_scales: bool) -> str:
    if module.kind == EXPERTS and is_transposed(model, weight) and not layout.only_experts:
        return SPLIT
    if module.kind == EXPERTS:
        return UNIT if unit_scales else EXPERTS
    return _HEADS.get(model.config.model_type, HEAD) if module.is_head else module.kind


def _fused_in_several(schemes: Mapping[str, Scheme | None]) -> list[str]:
    """Return the layers of the first group that engines fuse and that have several formats; empty for none."""
    for name in schemes:
        group = sorted(fused_with(name, schemes))
        if any(schemes[other] != schemes[name] for other in group):
            return [other.split(".")[-2] for other in group]
    return []


def _predicate(readings: Mapping[tuple[str, str], Reading], any_inputs: bool, untried: list[str]) -> str:
    refused, open_ones = (
        [_words(*part, reading) for part, reading in readings.items() if reading.loads is loads]
        for loads in (False, None)
    )
    if refused:
        return f"does not load {', '.join(refused)}"
    open_ones += untried
    if open_ones:
        return f"was not tried with {', '.join(open_ones)}"
    notes = dict.fromkeys(reading.inputs for reading in readings.values() if reading.inputs and any_inputs)
    return "loads it" + f" ({', '.join(notes)})" * bool(notes)


def _words(part: str, form: str, reading: Reading) -> str:
    return f"{_PARTS[part]} in {_named(form)}" + f" ({reading.text})" * bool(reading.text)


def _named(form: str) -> str:
    return NVFP4 if form == NVFP4_DIVISOR else form


def sentence(engines: Mapping[str, str]) -> str:
    """Return the result of `engines_that_load` as one line."""
    return "; ".join(f"{engine} {predicate}" for engine, predicate in engines.items())


def table() -> str:
    """Return `READINGS` as a table in Markdown."""
    head = ["layout", "weights", *(f"{engine} ({engine.where})" for engine in ENGINES)]
    lines: list[list[object]] = [[*head], ["---"] * len(head)]
    for row in READINGS:
        forms = ", ".join(f"`{_named(form)}`" for form in row.forms)
        lines.append([f"`{row.layout}`", f"{_PARTS[row.part]} in {forms}", *row.readings])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
