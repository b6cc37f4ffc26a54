"""Recipes: the settings of a quantizer as YAML.

    description: FP4 weights, FP8 activations, the first layer in FP8
    global: {weight: mxfp4, activation: mxfp8_e4m3}
    module_name:
      encoder.layer.0: {weight: mxfp8_e4m3, activation: mxfp8_e4m3}
    module_name_regex:
      .*lm_head: null
    first:
      2: {weight: mxint8}
    algorithms: balanced
    kv_cache: mxfp8

A config maps roles to specs; `null` leaves operators in high precision. A spec is a spelling that `pt2mx.parse` takes,
or a mapping of `MXSpec` fields (`{element: fp4_e2m1, block_size: 16}`). In a config, `operands` maps names of operands
to specs, `ste` selects the gradient, `value_blocks` the block axis of an attention's values, and `tensor_scale` the
scale of a whole activation. `gradient` is the spec of gradients in training, and `gradient_hadamard` the number of
values that are rotated before. `accumulator` is the register in which products are added. `first` and `last` map
numbers of operators to configs, and `small_weights` maps numbers of values of a weight.
`module_name_object_type_order` is a list of [module, type, index, config]. `algorithms` is how `pt2mx.optimize`
rounds the weights: a preset, or a mapping from algorithms to their options (`{gptq: {damping: 0.1}}`). `kv_cache` is
the spec of a decoder's cached keys and values.

The name of a format, such as `fp6_e3m2`, is a recipe too: weights and activations in that format.

The YAML is read strictly: duplicate keys are errors, and every mistake raises an `MXError`.
"""

from __future__ import annotations

import io
import json
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pt2mx.algorithms.options import Algorithm, chosen_algorithms, plain_algorithms
from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.files.output import write_text
from pt2mx.pt2e.quantizer.config import SPECS, MXQuantizationConfig
from pt2mx.pt2e.quantizer.operators import OPERAND_NAMES
from pt2mx.pt2e.quantizer.shipped import check_source, names
from pt2mx.spec import MXSpec, parse

#: kinds of settings whose keys are counts: of operators, and of a weight's values
ENDS = ("first", "last")
SMALL_WEIGHTS = "small_weights"
COUNTS = (*ENDS, SMALL_WEIGHTS)
#: the kind of settings whose keys are (module, type, index)
ORDER = "module_name_object_type_order"
#: kinds of settings, which are suffixes of `MXQuantizer`'s setters. All but the global one map keys to configs, or are
#: lists where keys have parts
KINDS = ("global", *COUNTS, ORDER, "module_name", "module_name_regex", "module_type", "operator_type")
#: the keys of the algorithms for weights, and of the format of a decoder's cache
ALGORITHMS, KV_CACHE = "algorithms", "kv_cache"
#: most characters of an error, which may quote a value of the file
_LONGEST = 1000
_SPEC_FIELDS = ("element", "block_size", "scale_mode", "rounding", "scale_format", "block_rows")

#: fields of a config that are choices
_CHOICES = ("ste", "value_blocks", "tensor_scale", "gradient_hadamard", "accumulator")

#: the key of a setting: a name, a count or (module, type, index); None for the global one
Key = str | int | tuple[str, str, int] | None
#: kind, key, config
Setting = tuple[str, Key, MXQuantizationConfig | None]


class Recipe(NamedTuple):
    """The settings of a recipe, the algorithms for the weights, and the format of the cache; None where not set."""

    settings: list[Setting]
    algorithms: tuple[Algorithm, ...] | None
    kv_cache: MXSpec | None


def read(path_or_name: object) -> Recipe:
    """Read a recipe file, a shipped recipe by name, or the recipe of a format.

    Raises:
        MXError: where there is no such recipe, or for an unknown key or value in it, naming the nearest valid one.
    """
    source = str(path_or_name)
    yaml = _content(source)  # its errors name the source
    try:
        plain = read_yaml(yaml, source)
        content = _mapping("the recipe", plain, ("description", *KINDS, ALGORITHMS, KV_CACHE))
        chosen, cache = content.get(ALGORITHMS), _spec(KV_CACHE, content.get(KV_CACHE))
        settings = _settings(content, needed=cache is None)
        return Recipe(settings, None if chosen is None else chosen_algorithms(chosen), cache)
    except MXError as error:
        text = str(error)
        raise MXError(f"recipe {source}: {text if len(text) <= _LONGEST else text[:_LONGEST] + ' ...'}") from None


def text(path_or_name: object) -> str:
    """Return the YAML text of a recipe file, of a shipped recipe by name, or of the recipe of a format.

    Raises:
        MXError: where there is no such recipe, and where a file is no text.
    """
    try:
        return _content(str(path_or_name)).decode()
    except UnicodeDecodeError as error:
        raise MXError(f"{str(path_or_name)!r} is no text: {error}") from None


def description(path_or_name: object) -> str:
    """Return the description of a recipe; "" where there is none."""
    source = str(path_or_name)
    content = read_yaml(_content(source), source)
    return str(content.get("description", "")) if isinstance(content, dict) else ""


def _content(source: str) -> bytes:
    shipped = {name: resources.files("pt2mx.configs").joinpath(f"{name}.yaml") for name in names()}
    if source in shipped:
        return shipped[source].read_bytes()
    check_source(source)
    try:
        if Path(source).is_file():
            return Path(source).read_bytes()
    except OSError as error:  # no permission, or a name that is too long
        raise MXError(f"cannot read {source!r}: {error.strerror}") from None
    if source.lower() in shipped:
        return shipped[source.lower()].read_bytes()
    description, spec = f"weights and activations in {parse(source)}", json.dumps(source)  # JSON is YAML
    return f"description: {description}\nglobal: {{weight: {spec}, activation: {spec}}}\n".encode()


def write(recipe: Recipe, path: object = None) -> str:
    """Return the YAML of a recipe, and write it to `path` unless that is None."""
    if not recipe.settings and recipe.kv_cache is None:
        raise MXError("the quantizer has no setting: a recipe of it would quantize nothing")
    return write_text(yaml_of(recipe), path)


def yaml_of(recipe: Recipe) -> str:
    """Return the YAML of a recipe; "" where nothing is set."""
    content: dict[str, Any] = {}
    for kind, key, config in recipe.settings:
        if key is None:
            content[kind] = _plain(config)
        elif isinstance(key, tuple):
            content.setdefault(kind, []).append([*key, _plain(config)])
        else:
            content.setdefault(kind, {})[key] = _plain(config)
    if recipe.algorithms is not None:
        content[ALGORITHMS] = plain_algorithms(recipe.algorithms)
    if recipe.kv_cache is not None:
        content[KV_CACHE] = str(recipe.kv_cache)
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False) if content else ""


class _Dumper(yaml.SafeDumper):
    """Write subclasses of str, int and float, such as NumPy's types and members of enumerations, as plain values."""


_Dumper.add_multi_representer(str, lambda dumper, value: dumper.represent_str(str.__str__(value)))
_Dumper.add_multi_representer(int, lambda dumper, value: dumper.represent_int(int(value)))
_Dumper.add_multi_representer(float, lambda dumper, value: dumper.represent_float(float(value)))


def _settings(recipe: dict[str, Any], needed: bool) -> list[Setting]:
    settings: list[Setting] = []
    for kind in KINDS:
        if kind not in recipe:
            continue
        if kind == "global":
            settings.append((kind, None, _config(kind, recipe[kind])))
            continue
        if kind == ORDER:
            settings += _ordered(recipe[kind])
            continue
        if not isinstance(recipe[kind], dict):
            keys = "counts" if kind in COUNTS else "names"
            raise MXError(f"{kind} must map {keys} to configs, not be {recipe[kind]!r}")
        for key, value in recipe[kind].items():
            settings.append((kind, key if kind in COUNTS else str(key), _config(f"{kind} {key!r}", value)))
    if needed and not settings:
        raise MXError(f"it quantizes nothing: give it at least one of {', '.join(KINDS)}")
    return settings


def _ordered(entries: object) -> list[Setting]:
    if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) == 4 for entry in entries):
        raise MXError(f"{ORDER} must be a list of [module, type, index, config], not {entries!r}")
    return [(ORDER, tuple(key), _config(f"{ORDER} {key}", config)) for *key, config in entries]


def _config(where: str, value: object) -> MXQuantizationConfig | None:
    if value is None:
        return None
    entries = _mapping(where, value, (*SPECS, "operands", *_CHOICES))
    fields: dict[str, Any] = {name: _spec(f"{where}: {name}", spec) for name, spec in entries.items() if name in SPECS}
    if "operands" in entries:
        operands = _mapping(f"{where}: operands", entries["operands"], OPERAND_NAMES)
        fields["operands"] = {name: _spec(f"{where}: operand {name!r}", spec) for name, spec in operands.items()}
    try:
        return MXQuantizationConfig(**fields, **{name: entries[name] for name in _CHOICES if name in entries})
    except MXError as error:
        raise MXError(f"{where}: {error}") from None


def _spec(where: str, value: object) -> MXSpec | None:
    try:
        if isinstance(value, dict):
            fields = dict(_mapping(where, value, _SPEC_FIELDS))
            if "element" not in fields:
                raise MXError(f"{where}: the element format is missing")
            return parse(fields.pop("element"), **fields)
        if value is not None and not isinstance(value, str):
            raise MXError(f"a spec is a format's name or a mapping of {', '.join(_SPEC_FIELDS)}, not {value!r}")
        return None if value is None else parse(value)
    except MXError as error:
        message = str(error)
        raise MXError(message if message.startswith(where) else f"{where}: {message}") from None


def _plain(config: MXQuantizationConfig | None) -> dict | None:
    if config is None:
        return None
    return {name: value for name, value in config.to_dict().items() if name not in ("observer", "is_qat")}


def _mapping(where: str, value: object, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Return `value`, checked to be a mapping whose keys are among `allowed`.

    Raises:
        MXError: for anything else; the text names the position `where`.
    """
    if not isinstance(value, dict):
        raise MXError(f"{where} must be a mapping of {', '.join(allowed)}, not {value!r}")
    for key in value:
        if key not in allowed:
            raise MXError(f"unknown key {key!r} in {where}: {nearest(key, allowed)}")
    return value


#: most values of a text; an alias counts as often as it occurs
_MOST_VALUES = 10_000
#: the errors of PyYAML, and those that it raises for values such as 2020-13-45
_ERRORS = (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, OverflowError)


def read_yaml(content: bytes, name: str) -> object:
    """Return the plain data of YAML text; errors call the text `name`.

    Raises:
        MXError: for invalid YAML, a duplicate key (with its lines), a recursive anchor, or too many values.
    """
    try:
        stream = io.BytesIO(content)
        stream.name = name  # PyYAML reads it
        loader = _Loader(stream)
        node = loader.get_single_node()
        if node is None:
            return None
        loader.check(node, {})
        return loader.construct_document(node)
    except MXError:
        raise
    except RecursionError:
        raise MXError("it is nested too deeply") from None
    except _ERRORS as error:
        raise MXError(" ".join(str(error).split()) or type(error).__name__) from None


class _Loader(yaml.SafeLoader):
    def check(self, node: yaml.Node, counts: dict[yaml.Node, int]) -> int:
        """Count the values of a node; `MXError` for a duplicate key or too many values.

        `counts` has the values of earlier nodes, and -1 for the nodes around this one.
        """
        if counts.get(node) == -1:
            raise MXError(f"the anchor in line {_line(node)} holds itself")
        if node not in counts:
            counts[node], parts = -1, node.value if isinstance(node, yaml.CollectionNode) else []
            if isinstance(node, yaml.MappingNode):
                self._check_keys(node)
                parts = [part for pair in parts for part in pair]
            counts[node] = 1 + sum(self.check(part, counts) for part in parts)
            if counts[node] > _MOST_VALUES:
                raise MXError(f"it has more than {_MOST_VALUES:,} values")
        return counts[node]

    def _check_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[object, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value != "<<":
                key = self.construct_object(key_node)
                if key in lines:
                    raise MXError(
                        f"the key {key!r} is there twice, in lines {lines[key]} and {_line(key_node)}: keep one of them"
                    )
                lines[key] = _line(key_node)


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
