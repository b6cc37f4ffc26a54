"""The `quantization_config` of compressed-tensors: groups of modules, each with a format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints import transform_config
from pt2mx.pt2e.models.layouts import LAYOUTS
from pt2mx.pt2e.models.module_schemes import (
    EMBEDDING,
    EXPERTS,
    LINEAR,
    Module,
    Rules,
    Scheme,
    by_class,
    by_name,
    most_common,
    unquantized,
)
from pt2mx.pt2e.models.weight_formats import BLOCK, NVFP4_DIVISOR, format_of, spec_of

_MX = {"strategy": "group", "group_size": BLOCK, "scale_dtype": "torch.uint8"}
_NV = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
#: weight format -> the format of a group, the fields that identify it, and `dynamic` of inputs
_FORMATS: dict[str, tuple[str, dict[str, Any], bool | str]] = {
    "fp4_e2m1": ("mxfp4-pack-quantized", {"num_bits": 4, **_MX}, True),
    "fp6_e2m3": ("mxfp6-pack-quantized", {"num_bits": 6, **_MX}, True),
    "fp8_e4m3": ("mxfp8-quantized", {"num_bits": 8, **_MX}, True),
    # the scale of the tensor is calibrated, those of blocks are computed in each call
    NVFP4_DIVISOR: ("nvfp4-pack-quantized", {"num_bits": 4, **_NV}, "local"),
}
_MX_BITS = {fields["num_bits"]: form for form, (_, fields, dynamic) in _FORMATS.items() if dynamic is True}
_MIXED = "mixed-precision"
#: the target of experts, which are not modules in memory: engines ask for `...experts.0.gate_proj`
_EXPERTS = r"re:.*\.experts\..*"


def write(modules: Mapping[str, Module]) -> dict[str, Any]:
    """Write one group per scheme. The most common scheme applies to all linear layers that nothing else names.

    Engines have a class of their own for the head, which the target "Linear" does not match: its name does."""
    schemes = most_common(modules.values())
    groups = {}
    for number, scheme in enumerate(schemes):
        kinds = {name: module.kind for name, module in modules.items() if module.scheme == scheme}
        heads = [name for name in kinds if modules[name].is_head]
        # compressed-tensors warns of a target all of whose modules an earlier one matched, such as a longer name
        shortest = [name for name in heads if not any(name.endswith(f".{other}") for other in heads)]
        named = [name for name, kind in kinds.items() if kind == EMBEDDING or (kind == LINEAR and number)]
        targets = [
            *[_EXPERTS] * (EXPERTS in kinds.values()),
            *(rf"re:.*{re.escape(name)}$" for name in shortest),
            *[LINEAR] * (number == 0 and LINEAR in kinds.values()),
            *(name for name in named if not modules[name].is_head),
        ]
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _arguments(scheme.form, inputs=False),
            "input_activations": None if scheme.inputs is None else _arguments(format_of(scheme.inputs), inputs=True),
            "output_activations": None,
            "format": _FORMATS[scheme.form][0],
        }
    formats = sorted({_FORMATS[scheme.form][0] for scheme in schemes})
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*unquantized(modules), *_ignored_experts(modules)],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        **transform_config.write(modules),
    }


def read(config: Mapping[str, Any]) -> Rules:
    """Read the rules in the precedence of compressed-tensors: ignored modules, then names, patterns and classes."""
    if config.get("kv_cache_scheme"):
        raise MXError("the checkpoint quantizes its cache (kv_cache_scheme), which is not read: take the entry out")
    ignored: Rules = []
    for pattern in config.get("ignore") or ():
        ignored += [(by_name(pattern), None), (by_class(pattern), None)]
    targets = {
        target: _scheme(name, group, config)
        for name, group in (config.get("config_groups") or {}).items()
        for target in group["targets"]
    }
    ordered = sorted(targets, key=lambda target: (target.startswith("re:"), target))
    named: Rules = [(by_name(target), targets[target]) for target in ordered]
    return [*ignored, *named, *((by_class(target), targets[target]) for target in ordered)]


def _ignored_experts(modules: Mapping[str, Module]) -> list[str]:
    """Return the patterns of the layers of experts in high precision."""
    of_experts = {name: module.scheme is None for name, module in modules.items() if module.kind == EXPERTS}
    if of_experts and all(of_experts.values()):
        return [_EXPERTS]
    return [rf"re:.*{re.escape(name)}\..*" for name, ignored in of_experts.items() if ignored]


def _arguments(form: str, inputs: bool) -> dict[str, Any]:
    _, fields, dynamic = _FORMATS[form]
    return {"type": "float", "symmetric": True, "dynamic": inputs and dynamic, **fields}


def _scheme(name: str, group: Mapping[str, Any], config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a group.

    Raises:
        MXError: where it is none of `_FORMATS`.
    """
    stated = group.get("format") or config.get("format")
    if group.get("output_activations"):
        raise MXError(f"{name} of config_groups quantizes outputs, which is not read")
    form = _form(name, "weights", group.get("weights"), inputs=False)
    if stated not in (_FORMATS[form][0], _MIXED):
        raise MXError(f"{name} of config_groups has the format {stated!r}, and weights of {_FORMATS[form][0]}")
    if not group.get("input_activations"):
        return Scheme(form)
    inputs = _form(name, "input_activations", group["input_activations"], inputs=True)
    (mode,) = LAYOUTS["compressed-tensors"].inputs[inputs]
    return Scheme(form, spec_of(inputs).replace(scale_mode=mode))


def _form(name: str, what: str, arguments: Mapping[str, Any] | None, inputs: bool) -> str:
    """Check the arguments of weights or inputs; return their format."""
    arguments = arguments or {}
    bits = arguments.get("num_bits")
    form = NVFP4_DIVISOR if arguments.get("strategy") == "tensor_group" else _MX_BITS.get(bits, "fp8_e4m3")
    expected = {**_arguments(form, inputs), "num_bits": bits}
    # the defaults of compressed-tensors, older versions of which leave out the dtype of NVFP4's scales
    actual = {"symmetric": True, "dynamic": False, **arguments}
    if form == NVFP4_DIVISOR:
        actual["scale_dtype"] = actual.get("scale_dtype") or expected["scale_dtype"]
    wrong = [f"{key} {actual.get(key)!r}" for key, value in expected.items() if actual.get(key) != value]
    if wrong or bits != _FORMATS[form][1]["num_bits"]:
        raise MXError(
            f"{what} of {name} in config_groups are not MX, but have {', '.join(wrong) or bits}: expected float of "
            f"{', '.join(map(str, _MX_BITS))} bits in groups of {BLOCK} with scale_dtype torch.uint8, or NVFP4"
        )
    return form
