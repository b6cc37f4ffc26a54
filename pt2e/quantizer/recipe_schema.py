"""The JSON schema of recipes, with which editors complete and check them; built from the tables that read recipes."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from pt2mx.algorithms.options import ALGORITHMS, PRESETS, RANGES
from pt2mx.formats import ELEMENTS
from pt2mx.modes import FLOAT_SCALE_MODES, ROUNDINGS, SCALE_MODES
from pt2mx.ops.checks import STRAIGHT_THROUGH
from pt2mx.pt2e.observe.tensor_scales import TENSOR_SCALES
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.quantizer.config import LARGEST_ROTATION, SPECS, VALUE_BLOCKS
from pt2mx.pt2e.quantizer.operators import OPERAND_NAMES
from pt2mx.scale_formats import SCALE_FORMATS

#: kind of setting -> description of its keys
_MEANINGS = {
    "global": "every operator that nothing else names",
    "first": "how many of the first operators -> their config",
    "last": "how many of the last operators -> their config",
    "small_weights": "the largest number of values of a small weight -> the config of operators with such weights",
    "module_name_object_type_order": "lists of module, operator, index, config",
    "module_name": "qualified name of a module -> its config",
    "module_name_regex": "regular expression of a module's whole name -> its config",
    "module_type": "class of a module -> its config",
    "operator_type": "operator, such as aten.linear -> its config",
}


def recipe_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of recipe files.

    Returns:
        The schema, as `json.dumps` takes it.

    Example:
        >>> from pt2mx.pt2e.quantizer.recipe_schema import recipe_schema
        >>> schema = recipe_schema()
        >>> sorted(schema["properties"])[:3], schema["$defs"]["spec_fields"]["required"]
        (['algorithms', 'description', 'first'], ['element'])
    """
    config = {"$ref": "#/$defs/config"}
    settings = {kind: {"description": _MEANINGS[kind], **_setting(kind, config)} for kind in recipe.KINDS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pt2mx recipe",
        "type": "object",
        "additionalProperties": False,
        "anyOf": [{"required": [name]} for name in (*recipe.KINDS, recipe.KV_CACHE)],
        "properties": {
            "description": {"type": "string"},
            **settings,
            recipe.ALGORITHMS: {"description": "the algorithms that round the weights", **_algorithms()},
            recipe.KV_CACHE: {"description": "the format of a decoder's keys and values", "$ref": "#/$defs/spec"},
        },
        "$defs": {"config": _config(), "spec": _spec(), "spec_fields": _spec_fields()},
    }


def _setting(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    if kind == "global":
        return config
    if kind == recipe.ORDER:
        key = [{"type": "string"}, {"type": "string"}, {"type": "integer"}, config]
        return {"type": "array", "items": {"type": "array", "prefixItems": key, "minItems": 4, "maxItems": 4}}
    counts = {"propertyNames": {"pattern": "^[0-9]+$"}} if kind in recipe.COUNTS else {}
    return {"type": "object", "additionalProperties": config, **counts}


def _config() -> dict[str, Any]:
    spec = {"$ref": "#/$defs/spec"}
    specs: dict[str, Any] = dict.fromkeys(SPECS, spec)
    operands = {"type": "object", "additionalProperties": False, "properties": dict.fromkeys(OPERAND_NAMES, spec)}
    choices = {"ste": STRAIGHT_THROUGH, "value_blocks": VALUE_BLOCKS, "tensor_scale": TENSOR_SCALES}
    words = {name: {"enum": list(allowed)} for name, allowed in choices.items()}
    sizes = [2**i for i in range(LARGEST_ROTATION.bit_length())]
    accumulator = {"type": "string", "examples": ["bfloat16", "float16{32,128}", "fixed(8,16)", "hopper"]}
    others = {"gradient_hadamard": {"enum": sizes}, "accumulator": accumulator}
    properties = {**specs, "operands": operands, **words, **others}
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}


def _spec() -> dict[str, Any]:
    text = {
        "type": "string",
        "examples": ["mxfp4", "mxfp6", "mxfp8", "mxint8", "mxfp4(even)", "mxfp8_e5m2{16}", "nvfp4"],
    }
    return {"anyOf": [text, {"$ref": "#/$defs/spec_fields"}, {"type": "null"}]}


def _spec_fields() -> dict[str, Any]:
    properties = {
        "element": {"type": "string", "examples": list(ELEMENTS)},
        "block_size": {"type": "integer", "minimum": 1},
        "scale_mode": {"enum": list({**SCALE_MODES, **FLOAT_SCALE_MODES})},
        "rounding": {"enum": list(ROUNDINGS)},
        "scale_format": {"enum": list(SCALE_FORMATS)},
        "block_rows": {"type": "integer", "minimum": 1},
    }
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": ["element"]}


def _algorithms() -> dict[str, Any]:
    kinds = {name: _options(kind) for name, kind in ALGORITHMS.items()}
    chosen = {"type": "object", "additionalProperties": False, "minProperties": 1, "properties": kinds}
    return {"anyOf": [{"enum": list(PRESETS)}, chosen, {"type": "null"}]}


def _options(kind: Any) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for field in fields(kind):
        types, least, most = RANGES[field.name]
        number = {"minimum": least, "maximum": most}
        name = "boolean" if types is bool else "integer" if types is int else "number"
        allowed = [name, "null"] if field.default is None else name
        properties[field.name] = {"type": allowed, **({} if types is bool else number)}
        if field.default is not MISSING:
            properties[field.name]["default"] = field.default
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}
