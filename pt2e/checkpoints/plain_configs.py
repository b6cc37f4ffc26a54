"""The `quantization_config` of layouts with one format: gpt-oss's MXFP4, ModelOpt's MXFP8, FP8 in blocks of [1, 32]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.layouts import BLOCK
from pt2mx.pt2e.checkpoints.schemes import (
    EMBEDDING,
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
from pt2mx.spec import MXSpec
from pt2mx.version import __version__

_E4M3 = MXSpec("fp8_e4m3", BLOCK, scale_mode="rceil")
_BLOCK_SIZE = [1, BLOCK]


def write_mxfp4(modules: Mapping[str, Module]) -> dict[str, Any]:
    """The experts are quantized, all else is named."""
    embeddings = [name for name, module in modules.items() if module.kind == EMBEDDING]
    return {"quant_method": "mxfp4", "modules_to_not_convert": [*unquantized(modules), *embeddings]}


def read_mxfp4(config: Mapping[str, Any]) -> Rules:
    """Experts alone."""
    return [(_not_converted(config), None), (lambda name, kind: kind == EXPERTS, Scheme("fp4_e2m1"))]


def write_modelopt(modules: Mapping[str, Module]) -> dict[str, Any]:
    """As `hf_quant_config.json` has it, and under the names that config.json has for the same."""
    arguments = {"num_bits": 8, "type": "float", "group_size": BLOCK}
    group = {
        "weights": {**arguments, "dynamic": False},
        "input_activations": {**arguments, "dynamic": True},
        "targets": [LINEAR],
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": "MXFP8",
        "group_size": BLOCK,
        "config_groups": {"group_0": group},
        "ignore": unquantized(modules),
        "producer": {"name": "pt2mx", "version": __version__},
    }


def modelopt_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of hf_quant_config.json for the `quantization_config` of config.json."""
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": config["group_size"],
        "exclude_modules": config["ignore"],
    }
    return {"producer": config["producer"], "quantization": quantization}


def read_modelopt(config: Mapping[str, Any]) -> Rules:
    """All linear layers but those that are excluded; inputs as ModelOpt's own MXFP8 has them."""
    inner = config.get("quantization") or config
    algorithm = inner.get("quant_algo")
    if algorithm != "MXFP8" or inner.get("group_size", BLOCK) != BLOCK:
        raise MXError(
            f"quant_algo {algorithm!r} of the checkpoint in groups of {inner.get('group_size')}: expected MXFP8"
        )
    if inner.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"):
        raise MXError("the checkpoint quantizes its cache, which is not read: take the entry out")
    excluded = [*(inner.get("exclude_modules") or ()), *(inner.get("ignore") or ())]
    return [*((by_wildcard(name), None) for name in excluded), (always, Scheme("fp8_e4m3", _E4M3))]


def write_fp8(modules: Mapping[str, Module]) -> dict[str, Any]:
    """All linear layers but those that are named."""
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": _BLOCK_SIZE,
        "modules_to_not_convert": unquantized(modules),
    }


def read_fp8(config: Mapping[str, Any]) -> Rules:
    """All linear layers but those that are named. Weights alone, as transformers computes where it has no kernel."""
    return [(_not_converted(config), None), (always, Scheme("fp8_e4m3"))]


def _not_converted(config: Mapping[str, Any]) -> Matches:
    """True of a module that a name is the beginning or the end of, or a pattern matches, as transformers has it."""
    names = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
    patterns = [(re.compile(one), one) for one in names]
    return lambda name, kind: any(pattern.match(name) or name.endswith(end) for pattern, end in patterns)
