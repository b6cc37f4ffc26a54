"""The `quantization_config` of AMD Quark: a scheme for all layers, schemes of named layers, and excluded layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.models.layouts import LAYOUTS
from pt2mx.pt2e.models.module_schemes import Module, Rules, Scheme, always, by_wildcard, most_common, unquantized
from pt2mx.pt2e.models.weight_formats import BLOCK
from pt2mx.spec import MXSpec

#: element -> `dtype`
_DTYPES = {"fp4_e2m1": "fp4", "fp6_e2m3": "fp6_e2m3", "fp6_e3m2": "fp6_e3m2", "fp8_e4m3": "fp8_e4m3"}
_ELEMENTS = {dtype: element for element, dtype in _DTYPES.items()}

#: rotations of inputs in `algo_config`, which each call computes and no weight contains
_ONLINE = ("online_r1_rotation", "r3", "r4")


def write(modules: Mapping[str, Module]) -> dict[str, Any]:
    """Write the most common scheme for all linear layers, and other schemes by name."""
    first, *_ = most_common(modules.values())
    others = {
        name: _layer(module.scheme)
        for name, module in modules.items()
        if module.scheme is not None and module.scheme != first
    }
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "algo_config": None,
        "global_quant_config": _layer(first),
        "layer_quant_config": others,
        "layer_type_quant_config": {},
        "exclude": unquantized(modules),
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "kv_cache_quant_config": {},
        "softmax_quant_spec": None,
    }


def read(config: Mapping[str, Any]) -> Rules:
    """Read the rules: excluded layers first, then named layers, then all linear layers."""
    export = config.get("export") or {}
    if export.get("weight_format", "real_quantized") != "real_quantized":
        raise MXError(f"weight_format {export['weight_format']!r} of the checkpoint: expected 'real_quantized' weights")
    if config.get("layer_type_quant_config") or config.get("kv_cache_quant_config"):
        raise MXError("layer_type_quant_config and kv_cache_quant_config of the checkpoint are not read")
    for algorithm in config.get("algo_config") or ():
        if online := [key for key in _ONLINE if algorithm.get(key)]:
            raise MXError(f"the checkpoint rotates inputs ({', '.join(online)} of algo_config), which is not read")
    rules: Rules = [(by_wildcard(name), None) for name in config.get("exclude") or ()]
    for name, layer in (config.get("layer_quant_config") or {}).items():
        rules.append((by_wildcard(name), _scheme(name, layer)))
    return [*rules, (always, _scheme("global_quant_config", config["global_quant_config"]))]


def _layer(scheme: Scheme) -> dict[str, Any]:
    inputs = scheme.inputs
    return {
        "weight": _tensor(scheme.form, "even", dynamic=False),
        "input_tensors": None if inputs is None else _tensor(inputs.element.name, inputs.scale_mode, dynamic=True),
        "output_tensors": None,
        "bias": None,
        "target_device": None,
    }


def _tensor(element: str, mode: str, dynamic: bool) -> dict[str, Any]:
    return {
        "dtype": _DTYPES[element],
        "qscheme": "per_group",
        "group_size": BLOCK,
        "ch_axis": -1,
        "is_dynamic": dynamic,
        "round_method": "half_even",
        "scale_type": "float",
        "scale_format": "e8m0",
        "scale_calculation_mode": mode,
        "symmetric": None,
        "mx_element_dtype": None,
        "observer_cls": "PerBlockMXObserver",
        "is_scale_quant": False,
    }


def _scheme(name: str, layer: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a layer.

    Raises:
        MXError: where it is no MX scheme.
    """
    if layer.get("output_tensors") or layer.get("bias"):
        raise MXError(f"{name} quantizes outputs or biases, which is not read")
    element, _ = _element(name, "weight", layer.get("weight"), dynamic=False)
    if not layer.get("input_tensors"):
        return Scheme(element)
    inputs, mode = _element(name, "input_tensors", layer["input_tensors"], dynamic=True)
    spec = MXSpec(inputs, BLOCK, scale_mode=mode)
    LAYOUTS["quark"].check_inputs(name, element, spec)
    return Scheme(element, spec)


def _element(name: str, what: str, fields: Mapping[str, Any] | None, dynamic: bool) -> tuple[str, str]:
    """Check the fields of a tensor; return its element and scale mode."""
    fields = fields or {}
    dtype = fields.get("mx_element_dtype") if fields.get("dtype") == "mx" else fields.get("dtype")
    expected = {"qscheme": "per_group", "group_size": BLOCK, "scale_format": "e8m0", "is_dynamic": dynamic}
    wrong = [f"{key} {fields.get(key)!r}" for key, value in expected.items() if fields.get(key) != value]
    if wrong or dtype not in _ELEMENTS or fields.get("ch_axis") not in (-1, 1):
        raise MXError(
            f"{what} of {name} is not MX, but has {', '.join([f'dtype {dtype!r}', *wrong])}: expected "
            f"{', '.join(_ELEMENTS)} per_group of {BLOCK} with scale_format e8m0"
        )
    return _ELEMENTS[dtype], fields.get("scale_calculation_mode") or "even"
