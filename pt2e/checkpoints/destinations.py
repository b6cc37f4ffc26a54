"""Where a quantized model is to run: what each destination takes of a recipe, and the form of a recipe that it takes.

`DESTINATIONS` is data. A destination with layouts gets a checkpoint, which holds weights and says what happens to
inputs; nothing else that a recipe asks for has a place in it. The formats that it takes are those of its layouts and,
where an engine is named, of `engines.READINGS`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pt2mx.algorithms.options import Algorithm, Rotation, Smoothing
from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.checkpoints.engines import ENGINES, HEAD, TRANSFORMERS, VLLM, Engine, loads, readings_of
from pt2mx.pt2e.checkpoints.recode import alike_form, tensor_scaled_inputs
from pt2mx.pt2e.models.gguf_tensors import GGUF
from pt2mx.pt2e.models.layouts import LAYOUTS, Layout
from pt2mx.pt2e.models.module_schemes import EMBEDDING, LINEAR
from pt2mx.pt2e.models.weight_formats import format_of, spec_of
from pt2mx.pt2e.quantizer import shipped
from pt2mx.pt2e.quantizer.config import Config
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.quantizer.recipe import ENDS, Key
from pt2mx.spec import MXSpec, parse

#: algorithm -> what it may do as the model runs
_AS_IT_RUNS = {Rotation: "rotate inputs", Smoothing: "scale inputs"}
#: the operator whose weight is an embedding, and the kinds of settings that name it or all operators
_EMBEDDING = "aten.embedding"
_OF_EMBEDDINGS = ("operator_type", "global")


@dataclass(frozen=True)
class Destination:
    """A place where a quantized model runs.

    Args:
        name: as `--for` takes it.
        command: the command that writes for it what `pt2mx quantize` left: {output} is the folder or program, {stem}
            the same without the suffix of a program, {model} the float checkpoint; "" where that runs itself.
        layouts: the layouts of its checkpoints, of which one has to hold a model; empty: no checkpoint, any format.
        engine: the library that has to load them; None: no library ran.
        transforms: True where inputs may be rotated and smoothed as the model runs.
        caches: True where a decoder's cache may be quantized.
        folders: True where it takes the folder of a language model.
        programs: True where it takes the program of another model.
        instead: format of weights -> the format that the recipes for a task have instead.
    """

    name: str
    command: str = ""
    layouts: tuple[Layout, ...] = ()
    engine: Engine | None = None
    transforms: bool = False
    caches: bool = False
    folders: bool = True
    programs: bool = True
    instead: Mapping[str, str] = field(default_factory=dict)


_CHECKPOINT = "pt2mx save-checkpoint {output} --float {model} --layout {layout} --output {output}-{name}"
_OF_MODELS = tuple(layout for layout in LAYOUTS.values() if not layout.only_experts)
_INT8 = "int8{32}(f16)"

#: destination by name, in the order of the matrix
DESTINATIONS: dict[str, Destination] = {
    row.name: row
    for row in (
        Destination(
            "vllm",
            _CHECKPOINT,
            _OF_MODELS,
            VLLM,
            programs=False,
            instead={"fp6_e2m3": "fp8_e4m3", "int8": "fp8_e4m3"},
        ),
        Destination(
            "transformers",
            _CHECKPOINT,
            _OF_MODELS,
            TRANSFORMERS,
            programs=False,
            instead={"int8": "fp8_e4m3"},
        ),
        Destination(
            "gguf",
            _CHECKPOINT + ".gguf",
            (GGUF,),
            programs=False,
            instead=dict.fromkeys(("fp6_e2m3", "int8", "fp8_e4m3"), _INT8),
        ),
        Destination("onnx", "pt2mx export-onnx {output} --output {stem}.onnx", transforms=True),
        Destination(
            "openvino",
            "pt2mx export-onnx {output} --output {stem}.onnx --target openvino",
            transforms=True,
        ),
        Destination(
            "executorch",
            "pt2mx export-executorch {output} --output {stem}.pte",
            transforms=True,
            folders=False,
        ),
        Destination("cpu", transforms=True, caches=True),
        Destination("cuda", transforms=True, caches=True),
    )
}


class Form(NamedTuple):
    """A recipe as destinations take it.

    Args:
        quantizer: its settings.
        changes: what it has otherwise than the recipe, a line each.
        layouts: destination -> the layout of its checkpoint, for those that get one.
    """

    quantizer: MXQuantizer
    changes: list[str]
    layouts: dict[str, Layout]


def destination_named(name: str) -> Destination:
    """Return the destination with a name.

    Raises:
        MXError: for another name.

    Example:
        >>> from pt2mx.pt2e.checkpoints.destinations import destination_named
        >>> destination_named("gguf").caches
        False
    """
    if name not in DESTINATIONS:
        raise MXError(f"unknown destination {name!r}: {nearest(name, DESTINATIONS)}")
    return DESTINATIONS[name]


def for_destinations(recipe: str | MXQuantizer, names: Iterable[str]) -> Form:
    """Return a recipe in the form that destinations take.

    Left out is what a destination has no place for: smoothing of inputs, a quantized cache, codes of embeddings.
    Rotations of inputs become rotations of weights, in models whose weights can hold them. Recipes for a task
    (`decoder_balanced`) also exchange formats that it has not.

    Args:
        recipe: the name of a shipped recipe, a format, or the path of a YAML file; or a quantizer, which stays as it
            is.
        names: of destinations: "vllm", "transformers", "gguf", "onnx", "openvino", "executorch", "cpu" and "cuda".

    Returns:
        The form.

    Raises:
        MXError: for an unknown recipe or destination, and where a destination takes no form of the recipe.

    Example:
        >>> import pt2mx
        >>> form = pt2mx.for_destinations("mxfp4_decoder", ["vllm"])
        >>> print(*form.changes, sep="\\n")
        rotations in the weights, where a model allows it, instead of rotated inputs
        a cache in high precision instead of mxint8{32}
        weights in mxfp8_e4m3{32}(even,even) instead of mxint8{32}
        the embedding in high precision instead of mxfp8_e4m3{32}(even,even)
        >>> form.quantizer.kv_cache is None
        True
    """
    destinations = [destination_named(name) for name in names]
    if isinstance(recipe, MXQuantizer):
        quantizer, called, task = recipe, "the settings", None
    else:
        quantizer = MXQuantizer.from_recipe(recipe)
        called = f"the recipe {recipe!r}"
        task = shipped.task_of(recipe)
    form = Form(quantizer, [], {})
    for destination in destinations:
        if task is not None and not (destination.folders if task == "decoder" else destination.programs):
            raise MXError(
                f"{destination.name} does not take {called}: no command writes a model of this task ({task}) for it"
            )
        form = _form(form, destination, exchanges=task is not None)
    for destination in destinations:
        if reasons := refusals(form, destination):
            raise MXError(f"{destination.name} does not take {called}: {'; '.join(reasons)}")
    return form


def refusals(form: Form, destination: Destination) -> list[str]:
    """Return why a destination does not take what a form asks for, whatever the model; empty: it takes it."""
    quantizer, reasons = form.quantizer, []
    if not destination.transforms and (transforms := _transforms(quantizer)):
        reasons.append(f"{_named(transforms)} would change inputs as the model runs")
    if not destination.caches and quantizer.kv_cache is not None:
        reasons.append(f"its cache is in {quantizer.kv_cache}")
    if destination.layouts:
        reasons += _misfits(quantizer, form.layouts[destination.name], destination.engine)
    elif destination.command:
        reasons += [f"{spec} is registered in this process alone" for spec in _registered(quantizer)]
    return reasons


def next_command(form: Form, name: str, model: str, output: str) -> str:
    """Return the command that writes what a destination takes.

    Args:
        form: the form that was quantized.
        name: the destination.
        model: the float checkpoint.
        output: what `pt2mx quantize` wrote.

    Returns:
        The command; "" where the destination takes what was written.
    """
    layout = form.layouts.get(name)
    paths = {"model": model, "output": output, "stem": output.removesuffix(".pt2")}
    quoted = {field: shlex.quote(path) for field, path in paths.items()}
    return destination_named(name).command.format(name=name, layout=layout and layout.name, **quoted)


def needs(quantizer: MXQuantizer) -> list[str]:
    """Return what a runtime of a quantizer's models must do beyond decoding weights, a line each.

    Example:
        >>> import pt2mx
        >>> from pt2mx.pt2e.checkpoints.destinations import needs
        >>> needs(pt2mx.MXQuantizer.from_recipe("decoder_balanced"))
        ['rotate inputs', 'quantize the cache to mxint8{32}']
    """
    lines = [_AS_IT_RUNS[type(one)] for one in _transforms(quantizer)]
    configs = [config for _, _, config in quantizer.settings if config is not None]
    inputs = dict.fromkeys(str(config.activation) for config in configs if config.activation is not None)
    if inputs:
        lines.append(f"quantize inputs to {' and '.join(inputs)}")
    if quantizer.kv_cache is not None:
        lines.append(f"quantize the cache to {quantizer.kv_cache}")
    return lines


def _registered(quantizer: MXQuantizer) -> dict[MXSpec, None]:
    """Return the formats that a graph of a quantizer's models names, and that this process registered. A graph does not
    say how the scales of a weight were chosen."""
    configs = [config for _, _, config in quantizer.settings if config is not None]
    specs: dict[MXSpec, None] = {}
    for config in configs:
        others = config.activation, config.output, config.bias, *dict(config.operands).values()
        specs |= {spec: None for spec in others if spec is not None and spec.is_registered}
        if config.weight is not None and config.weight.element.is_registered:
            specs[config.weight] = None
    return specs


def _transforms(quantizer: MXQuantizer) -> list[Algorithm]:
    """Return the algorithms that may change inputs as the model runs."""
    return [one for one in quantizer.algorithms or () if isinstance(one, Smoothing) or _is_online(one)]


def _is_online(algorithm: Algorithm) -> bool:
    return isinstance(algorithm, Rotation) and algorithm.online


def _named(transforms: list[Algorithm]) -> str:
    return " and ".join(type(one).__name__ for one in transforms)


def _form(form: Form, destination: Destination, exchanges: bool) -> Form:
    """Return a form as a destination takes it, as far as it can."""
    quantizer = form.quantizer.with_configs(lambda kind, key, config: config)
    changes: list[str] = []
    if not destination.transforms and _transforms(quantizer):
        quantizer.set_algorithms(_in_weights(quantizer.algorithms or (), changes) or None)
    if not destination.caches and quantizer.kv_cache is not None:
        changes.append(f"a cache in high precision instead of {quantizer.kv_cache}")
        quantizer.set_kv_cache(None)
    form = Form(quantizer, form.changes + changes, form.layouts)
    if not destination.layouts:
        return form
    forms = [_in_layout(form, layout, destination, exchanges) for layout in destination.layouts]
    return min(forms, key=lambda form: len(refusals(form, destination)))


def _in_weights(algorithms: Iterable[Algorithm], changes: list[str]) -> list[Algorithm]:
    """Return algorithms without those that change inputs as the model runs, and add what changed."""
    result: list[Algorithm] = []
    for algorithm in algorithms:
        if isinstance(algorithm, Smoothing):
            changes.append("without Smoothing, which scales inputs")
        elif _is_online(algorithm):
            result.append(Rotation(online=False, strict=False))
            changes.append("rotations in the weights, where a model allows it, instead of rotated inputs")
        else:
            result.append(algorithm)
    return result


def _in_layout(form: Form, layout: Layout, destination: Destination, exchanges: bool) -> Form:
    """Return a form with formats that a layout has."""
    changes: dict[str, None] = {}
    instead = destination.instead if exchanges else {}

    def changed(kind: str, key: Key, config: Config) -> Config:
        if config is None:
            return None
        weight, inputs = _exchanged(config.weight, instead), _exchanged(config.activation, instead)
        if inputs is not None and not layout.inputs and exchanges:
            inputs = None
        elif inputs is not None:
            inputs = layout.as_read(inputs)
        for old, new, what in ((config.weight, weight, "weights"), (config.activation, inputs, "inputs")):
            if new != old:
                changes[f"{what} in {new or 'high precision'} instead of {old}"] = None
        return replace(config, weight=weight, activation=inputs)

    result = form.quantizer.with_configs(changed)
    embedded = _embedded(result)
    if embedded is not None and not _takes(layout, destination.engine, EMBEDDING, embedded):
        result.set_operator_type(_EMBEDDING, None)
        changes[f"the embedding in high precision instead of {embedded}"] = None
    return Form(result, form.changes + list(changes), form.layouts | {destination.name: layout})


def _exchanged(spec: MXSpec | None, instead: Mapping[str, str]) -> MXSpec | None:
    if spec is None or format_of(spec) not in instead:
        return spec
    new = parse(instead[format_of(spec)])
    return new.replace(scale_mode="even") if new.has_e8m0_scale else new


def _embedded(quantizer: MXQuantizer) -> MXSpec | None:
    """Return the format of embeddings by the settings of their operator, or of all operators."""
    configs: dict[Key, Config] = {key: config for kind, key, config in quantizer.settings if kind in _OF_EMBEDDINGS}
    config = configs.get(_EMBEDDING, configs.get(None))
    return None if config is None else config.weight


def _misfits(quantizer: MXQuantizer, layout: Layout, engine: Engine | None) -> list[str]:
    """Return what a layout cannot hold of the settings, or the engine does not load."""
    reasons = []
    embedded = _embedded(quantizer)
    if embedded is not None and not _takes(layout, engine, EMBEDDING, embedded):
        reasons.append(f"the embedding is in {embedded}")
    for kind, key, config in quantizer.settings:
        if config is None or key == _EMBEDDING:
            continue
        where = kind if key is None else f"{kind} {key!r}"
        if engine is not None and engine.fuses and kind in ENDS:
            reasons.append(f"{where} gives formats to operators that {engine.name} multiplies at once with others")
        if config.weight is not None and not _takes(layout, engine, LINEAR, config.weight):
            reasons.append(f"weights of {where} are in {config.weight}{_because(layout, engine, config.weight)}")
        if config.weight is not None and config.activation is None and format_of(config.weight) in layout.always_inputs:
            reasons.append(f"inputs of {where} are in high precision")
        if config.activation is not None and not _reads(layout, config.activation):
            reasons.append(f"inputs of {where} are in {config.activation}")
        others = {"outputs": config.output, "biases": config.bias, **dict(config.operands)}
        reasons += [f"{what} of {where} are in {spec}" for what, spec in others.items() if spec is not None]
    return reasons


def _takes(layout: Layout, engine: Engine | None, part: str, spec: MXSpec) -> bool:
    """Return whether a layout has the format of a weight, and an engine is known to load it."""
    form = alike_form(format_of(spec), layout.stored)
    if form is None or (spec.has_e8m0_scale and spec.block_size != spec_of(form).block_size):
        return False
    if part == EMBEDDING and (form not in layout.embeddings or spec.has_tensor_scale):  # llama.cpp has no place for it
        return False
    parts = (LINEAR, HEAD) if part == LINEAR else (part,)  # names of modules do not tell what is the head
    return engine is None or all(loads(engine, layout.name, one, form) for one in parts)


def _because(layout: Layout, engine: Engine | None, spec: MXSpec) -> str:
    """Return why an engine did not load a weight, in brackets; "" where that is not known."""
    form = alike_form(format_of(spec), layout.stored)
    if engine is None or form is None:
        return ""
    readings = (readings_of(layout.name, part, form)[ENGINES.index(engine)] for part in (LINEAR, HEAD))
    return next((f" ({engine}: {reading.text})" for reading in readings if reading.loads is False), "")


def _reads(layout: Layout, inputs: MXSpec) -> bool:
    if inputs.has_tensor_scale:
        return tensor_scaled_inputs(inputs, layout) is not None
    return layout.takes_inputs(inputs)


def cell(recipe: str, destination: str) -> str:
    """Return "yes" where a destination takes a recipe as it is, "form" where it takes a form of it, otherwise "no".

    Example:
        >>> from pt2mx.pt2e.checkpoints.destinations import cell
        >>> cell("decoder_best", "cpu"), cell("decoder_best", "vllm"), cell("mxint8", "vllm")
        ('yes', 'form', 'no')
    """
    try:
        return "form" if for_destinations(recipe, [destination]).changes else "yes"
    except MXError:
        return "no"


def table() -> str:
    """Return recipes and destinations as a table in Markdown."""
    lines = [["recipe", *DESTINATIONS], ["---"] * (1 + len(DESTINATIONS))]
    for recipe in shipped.names():
        lines.append([f"`{recipe}`", *(cell(recipe, destination) for destination in DESTINATIONS)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
