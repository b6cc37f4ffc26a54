"""The `quantization_config` of compressed-tensors: groups of modules, each with a format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints.layouts import BLOCK, LAYOUTS
from pt2mx.pt2e.checkpoints.module_schemes import (
    EMBEDDING,
    EXPERTS,
    LINEAR,
    Matches,
    Module,
    Rules,
    Scheme,
    most_common,
    unquantized,
)
from pt2mx.spec import MXSpec

#: element -> the format of a group, and the bits that identify the element
_FORMATS = {
    "fp4_e2m1": ("mxfp4-pack-quantized", 4),
    "fp6_e2m3": ("mxfp6-pack-quantized", 6),
    "fp8_e4m3": ("mxfp8-quantized", 8),
}
_ELEMENTS = {bits: element for element, (_, bits) in _FORMATS.items()}
_MIXED = "mixed-precision"
#: the target of experts, which are not modules in memory
_EXPERTS = r"re:.*\.experts\..*"


def write(modules: Mapping[str, Module]) -> dict[str, Any]:
    """Write one group per scheme. The most common scheme applies to all linear layers that nothing else names."""
    schemes = most_common(modules.values())
    groups = {}
    for number, scheme in enumerate(schemes):
        kinds = {name: module.kind for name, module in modules.items() if module.scheme == scheme}
        named = [name for name, kind in kinds.items() if kind == EMBEDDING or (kind == LINEAR and number)]
        targets = (
            [_EXPERTS] * (EXPERTS in kinds.values()) + [LINEAR] * (number == 0 and LINEAR in kinds.values()) + named
        )
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _arguments(scheme.element, dynamic=False),
            "input_activations": None
            if scheme.inputs is None
            else _arguments(scheme.inputs.element.name, dynamic=True),
            "output_activations": None,
            "format": _FORMATS[scheme.element][0],
        }
    formats = sorted({_FORMATS[scheme.element][0] for scheme in schemes})
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": unquantized(modules),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def read(config: Mapping[str, Any]) -> Rules:
    """Read the rules in the precedence of compressed-tensors: ignored modules, then names, patterns and classes."""
    if config.get("kv_cache_scheme"):
        raise MXError("the checkpoint quantizes its cache (kv_cache_scheme), which is not read: take the entry out")
    if config.get("transform_config"):
        raise MXError("the checkpoint transforms inputs (transform_config), which is not read: give one without")
    ignored: Rules = []
    for pattern in config.get("ignore") or ():
        ignored += [(_by_name(pattern), None), (_by_class(pattern), None)]
    targets = {
        target: _scheme(name, group, config)
        for name, group in (config.get("config_groups") or {}).items()
        for target in group["targets"]
    }
    ordered = sorted(targets, key=lambda target: (target.startswith("re:"), target))
    named: Rules = [(_by_name(target), targets[target]) for target in ordered]
    return [*ignored, *named, *((_by_class(target), targets[target]) for target in ordered)]


def _arguments(element: str, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": _FORMATS[element][1],
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": BLOCK,
        "dynamic": dynamic,
        "scale_dtype": "torch.uint8",
    }


def _scheme(name: str, group: Mapping[str, Any], config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a group.

    Raises:
        MXError: where it is no MX scheme.
    """
    form = group.get("format") or config.get("format")
    if group.get("output_activations"):
        raise MXError(f"{name} of config_groups quantizes outputs, which is not read")
    element = _element(name, "weights", group.get("weights"), dynamic=False)
    if form not in (_FORMATS[element][0], _MIXED):
        raise MXError(f"{name} of config_groups has the format {form!r}, and weights of {_FORMATS[element][0]}")
    if not group.get("input_activations"):
        return Scheme(element)
    inputs = _element(name, "input_activations", group["input_activations"], dynamic=True)
    (mode,) = LAYOUTS["compressed-tensors"].inputs[inputs]
    return Scheme(element, MXSpec(inputs, BLOCK, scale_mode=mode))


def _element(name: str, what: str, arguments: Mapping[str, Any] | None, dynamic: bool) -> str:
    """Check the arguments of weights or inputs; return the element."""
    arguments = arguments or {}
    expected = {**_arguments("fp8_e4m3", dynamic), "num_bits": arguments.get("num_bits")}
    # the defaults of compressed-tensors
    actual = {"symmetric": True, "dynamic": False, **arguments}
    wrong = [f"{key} {actual.get(key)!r}" for key, value in expected.items() if actual.get(key) != value]
    if wrong or arguments.get("num_bits") not in _ELEMENTS:
        raise MXError(
            f"{what} of {name} in config_groups are not MX, but have {', '.join(wrong) or arguments.get('num_bits')}: "
            f"expected float of {', '.join(map(str, _ELEMENTS))} bits in groups of {BLOCK} with scale_dtype torch.uint8"
        )
    return _ELEMENTS[arguments["num_bits"]]


def _by_name(target: str) -> Matches:
    if target.startswith("re:"):
        pattern = re.compile(target[3:])
        return lambda name, kind: pattern.match(name) is not None
    return lambda name, kind: name == target


def _by_class(target: str) -> Matches:
    return lambda name, kind: kind == target
