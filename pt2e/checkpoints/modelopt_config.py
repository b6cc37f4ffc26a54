"""The `quantization_config` of ModelOpt: one algorithm for all layers, or one for each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.models.layouts import LAYOUTS
from pt2mx.pt2e.models.module_schemes import (
    EXPERTS,
    LINEAR,
    Matches,
    Module,
    Rules,
    Scheme,
    always,
    by_wildcard,
    unquantized,
)
from pt2mx.pt2e.models.weight_formats import FP8_BLOCKS, NVFP4, spec_of
from pt2mx.version import __version__

#: `quant_algo` -> the format of weights, whether inputs are quantized to it too, and whether layers may have factors of
#: their inputs. Inputs of FP8 stay in high precision; the grid of scales tells a tensor, its rows and blocks apart
_ALGORITHMS = {
    "MXFP8": ("fp8_e4m3", True, False),
    "NVFP4": (NVFP4, True, False),
    "W4A16_NVFP4": (NVFP4, False, False),
    "NVFP4_AWQ": (NVFP4, True, True),
    "FP8_PB_WO": (FP8_BLOCKS, False, False),
    "FP8": (FP8_BLOCKS, False, False),
    "FP8_PER_CHANNEL_PER_TOKEN": (FP8_BLOCKS, False, False),
}
_MIXED = "MIXED_PRECISION"
_EXPERTS = re.compile(r"(\.experts)\..*")


def write(modules: Mapping[str, Module]) -> dict[str, Any]:
    """Write one algorithm, or one for each layer, with the field names of hf_quant_config.json and config.json."""
    has_factors = any(module.pre_scaled for module in modules.values())
    layers = {
        _EXPERTS.sub(r"\1", name) if module.kind == EXPERTS else name: _algorithm(module.scheme, has_factors)
        for name, module in modules.items()
        if module.scheme is not None
    }
    algorithms = list(dict.fromkeys(layers.values()))
    groups = {}
    for number, algorithm in enumerate(algorithms):
        named = sorted(name for name, one in layers.items() if one == algorithm)
        targets = [LINEAR] if len(algorithms) == 1 else named
        groups[f"group_{number}"] = {**_group(algorithm), "targets": targets}
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": algorithms[0],
        "config_groups": groups,
        "ignore": unquantized(modules),
        "producer": {"name": "pt2mx", "version": __version__},
    }
    if len(algorithms) == 1:
        return {**config, **_fields(algorithms[0])}
    quantized = {name: {"quant_algo": algorithm, **_fields(algorithm)} for name, algorithm in layers.items()}
    return {**config, "quant_algo": _MIXED, "quantized_layers": quantized}


def file_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of hf_quant_config.json for the `quantization_config` of config.json."""
    others = {"quant_method", "config_groups", "ignore", "producer"}
    quantization = {
        **{name: value for name, value in config.items() if name not in others},
        "kv_cache_quant_algo": None,
        "exclude_modules": config["ignore"],
    }
    return {"producer": config["producer"], "quantization": quantization}


def read(config: Mapping[str, Any]) -> Rules:
    """Read the rules: excluded layers, then all others, or the layers that have an algorithm of their own."""
    inner = config.get("quantization") or config
    if inner.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"):
        raise MXError("the checkpoint quantizes its cache, which is not read: take the entry out")
    excluded = [*(inner.get("exclude_modules") or ()), *(inner.get("ignore") or ())]
    rules: Rules = [(by_wildcard(name), None) for name in excluded]
    groups = (inner.get("config_groups") or config.get("config_groups") or {}).values()
    weights_alone = bool(groups) and not any(group.get("input_activations") for group in groups)
    if inner.get("quant_algo") != _MIXED:
        return [*rules, (always, _scheme("the checkpoint", inner, weights_alone))]
    layers: Mapping[str, Mapping[str, Any]] = inner.get("quantized_layers") or {}
    if not layers:
        raise MXError(f"{_MIXED} of the checkpoint has no quantized_layers: fetch its hf_quant_config.json")
    named: dict[Scheme, list[str]] = {}
    for name, fields in layers.items():
        named.setdefault(_scheme(name, fields, weights_alone), []).append(name)
    return [*rules, *((_inside(names), scheme) for scheme, names in named.items())]


def _inside(names: Iterable[str]) -> Matches:
    """Return the predicate of modules with one of these names, or inside one, as an expert is inside of all experts."""
    known = frozenset(names)

    def matches(name: str, kind: str) -> bool:
        ends = [len(name), *(i for i, letter in enumerate(name) if letter == ".")]
        return any(name[:end] in known for end in ends)

    return matches


def _scheme(name: str, fields: Mapping[str, Any], weights_alone: bool) -> Scheme:
    """Return the scheme of an algorithm.

    Args:
        name, fields: the layer, and what the configuration says of it.
        weights_alone: True where no group of the configuration quantizes inputs. NVFP4 is W4A16_NVFP4 then: the
            checkpoint holds no scales of inputs.

    Raises:
        MXError: for one that is not known, and for other blocks than its own.
    """
    algorithm = str(fields.get("quant_algo"))
    expected = _fields(algorithm).get("group_size") if algorithm in _ALGORITHMS else None
    if algorithm not in _ALGORITHMS or (expected and fields.get("group_size", expected) != expected):
        sizes = {one: _fields(one).get("group_size") for one in _ALGORITHMS}
        allowed = ", ".join(one + (f" in groups of {size}" if size else "") for one, size in sizes.items())
        raise MXError(
            f"quant_algo {algorithm!r} of {name} in groups of {fields.get('group_size')}: expected {_MIXED}, {allowed}"
        )
    form, has_inputs, _ = _ALGORITHMS[algorithm]
    has_inputs = has_inputs and not (weights_alone and spec_of(form).has_tensor_scale)
    (mode,) = LAYOUTS["modelopt"].inputs.get(form, ("",))
    return Scheme(form, spec_of(form).replace(scale_mode=mode) if has_inputs else None)


def _algorithm(scheme: Scheme, has_factors: bool) -> str:
    """Return the name of a scheme, in a checkpoint that holds factors of inputs or not."""
    wanted = scheme.form, scheme.inputs is not None
    names = {factors: name for name, (*row, factors) in reversed(_ALGORITHMS.items()) if tuple(row) == wanted}
    return names.get(has_factors, names[False])


def _fields(algorithm: str) -> dict[str, Any]:
    """Return the fields of a layer, apart from the name of its algorithm."""
    form, _, has_factors = _ALGORITHMS[algorithm]
    if form == FP8_BLOCKS:
        return {}
    factors = {"has_zero_point": False, "pre_quant_scale": True} if has_factors else {}
    return {"group_size": spec_of(form).block_size, **factors}


def _group(algorithm: str) -> dict[str, Any]:
    """Return the fields of an entry of `config_groups`."""
    form, has_inputs, _ = _ALGORITHMS[algorithm]
    spec = spec_of(form)
    arguments = {"num_bits": spec.element.bits, "type": "float", **_fields(algorithm)}
    arguments = {name: value for name, value in arguments.items() if name in ("num_bits", "type", "group_size")}
    group: dict[str, Any] = {"weights": {**arguments, "dynamic": False}}
    if has_inputs:
        group["input_activations"] = {**arguments, "dynamic": not spec.has_tensor_scale}
    return group
