"""The `quantization_config` of checkpoints, written and read in each layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints import compressed_tensors_config, quark_config, read_only_configs
from pt2mx.pt2e.checkpoints.layouts import LAYOUTS, Layout
from pt2mx.pt2e.checkpoints.module_schemes import (
    EMBEDDING,
    EXPERTS,
    LINEAR,
    Module,
    Rules,
    Scheme,
    Schemes,
    always,
    by_wildcard,
    most_common,
    not_converted,
    unquantized,
)
from pt2mx.pt2e.checkpoints.weight_formats import BLOCK, NVFP4, spec_of
from pt2mx.pt2e.user_errors import user_errors
from pt2mx.version import __version__

#: `quant_algo` of ModelOpt -> the format of weights, and whether inputs are quantized to it too
_MODELOPT = {"MXFP8": ("fp8_e4m3", True), "NVFP4": (NVFP4, True), "W4A16_NVFP4": (NVFP4, False)}


def write_mxfp4(modules: Mapping[str, Module]) -> dict[str, Any]:
    """Write the modules that are not quantized: all but experts."""
    embeddings = [name for name, module in modules.items() if module.kind == EMBEDDING]
    return {"quant_method": "mxfp4", "modules_to_not_convert": [*unquantized(modules), *embeddings]}


def read_mxfp4(config: Mapping[str, Any]) -> Rules:
    """Read the rules of gpt-oss, which quantizes only experts."""
    return [(not_converted(config), None), (lambda name, kind: kind == EXPERTS, Scheme("fp4_e2m1"))]


def write_modelopt(modules: Mapping[str, Module]) -> dict[str, Any]:
    """Write ModelOpt's MXFP8 or NVFP4, with the field names of both hf_quant_config.json and config.json.

    Raises:
        MXError: for modules of several schemes.
    """
    schemes = [(scheme.form, scheme.inputs is not None) for scheme in most_common(modules.values())]
    algorithm = next((name for name, scheme in _MODELOPT.items() if [scheme] == list(dict.fromkeys(schemes))), None)
    if algorithm is None:
        raise MXError(f"modelopt has one scheme a checkpoint, {', '.join(_MODELOPT)}: give all layers the same")
    spec = spec_of(schemes[0][0])
    arguments = {"num_bits": spec.element.bits, "type": "float", "group_size": spec.block_size}
    group: dict[str, Any] = {"weights": {**arguments, "dynamic": False}}
    if schemes[0][1]:
        group["input_activations"] = {**arguments, "dynamic": not spec.scale_format.tensor}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": spec.block_size,
        "config_groups": {"group_0": {**group, "targets": [LINEAR]}},
        "ignore": unquantized(modules),
        "producer": {"name": "pt2mx", "version": __version__},
    }


def modelopt_file(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of hf_quant_config.json for the `quantization_config` of config.json."""
    quantization = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": config["group_size"],
        "exclude_modules": config["ignore"],
    }
    return {"producer": config["producer"], "quantization": quantization}


def read_modelopt(config: Mapping[str, Any]) -> Rules:
    """Read the rules: all linear layers except excluded ones; inputs are quantized as ModelOpt does."""
    inner = config.get("quantization") or config
    algorithm = str(inner.get("quant_algo"))
    if algorithm not in _MODELOPT or inner.get("group_size", _group_size(algorithm)) != _group_size(algorithm):
        raise MXError(
            f"quant_algo {algorithm!r} of the checkpoint in groups of {inner.get('group_size')}: expected "
            f"{', '.join(f'{name} in groups of {_group_size(name)}' for name in _MODELOPT)}"
        )
    if inner.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"):
        raise MXError("the checkpoint quantizes its cache, which is not read: take the entry out")
    excluded = [*(inner.get("exclude_modules") or ()), *(inner.get("ignore") or ())]
    form, has_inputs = _MODELOPT[algorithm]
    (mode,) = LAYOUTS["modelopt"].inputs[form]
    scheme = Scheme(form, spec_of(form).replace(scale_mode=mode) if has_inputs else None)
    return [*((by_wildcard(name), None) for name in excluded), (always, scheme)]


def _group_size(algorithm: str) -> int:
    return spec_of(_MODELOPT[algorithm][0]).block_size


def write_fp8(modules: Mapping[str, Module]) -> dict[str, Any]:
    """Write the linear layers that are not quantized, and the block of those that are."""
    forms = {module.scheme.form for module in modules.values() if module.scheme is not None}
    blocks = sorted({(spec.block_rows, spec.block_size) for spec in map(spec_of, forms)}, reverse=True)
    config: dict[str, Any] = {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(blocks[0]),
        "modules_to_not_convert": unquantized(modules),
    }
    if forms - {"fp8_e4m3"}:  # as DeepSeek does
        floats = any(spec_of(form).scale_format.name == "f32" for form in forms)
        config |= {"quant_method": "fp8", "fmt": "e4m3", **({} if floats else {"scale_fmt": "ue8m0"})}
    return config


def read_fp8(config: Mapping[str, Any]) -> Rules:
    """Read the rules: the weights of all linear layers that are not named.

    Inputs stay in high precision, as in transformers without its kernel."""
    return [(not_converted(config), None), (always, Scheme("fp8_e4m3"))]


def model_fields(layout: Layout, modules: Mapping[str, Module]) -> dict[str, Any]:
    """Return the fields of config.json outside of `quantization_config`: DeepSeek says there that experts are FP4."""
    forms = {module.scheme.form for module in modules.values() if module.scheme is not None}
    return {"expert_dtype": "fp4"} if layout.name == "fp8" and "fp4_e2m1" in forms else {}


def _block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the `weight_block_size` of a configuration.

    Raises:
        MXError: where it is no pair of numbers.
    """
    block = config.get("weight_block_size") or (1, BLOCK)
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise MXError(f"weight_block_size {block!r} of the checkpoint: expected the rows and columns of a block")
    return block[0], block[1]


@dataclass(frozen=True)
class Method:
    """A kind of `quantization_config`: the functions that write and read it, and the layout of its tensors."""

    write: Callable[[Mapping[str, Module]], dict[str, Any]] | None
    read: Callable[[Mapping[str, Any]], Rules]
    layout: Layout


#: `quant_method`, which is the name of a layout that is written -> its functions
_METHODS = {
    "compressed-tensors": Method(
        compressed_tensors_config.write, compressed_tensors_config.read, LAYOUTS["compressed-tensors"]
    ),
    "mxfp4": Method(write_mxfp4, read_mxfp4, LAYOUTS["mxfp4"]),
    "quark": Method(quark_config.write, quark_config.read, LAYOUTS["quark"]),
    "modelopt": Method(write_modelopt, read_modelopt, LAYOUTS["modelopt"]),
    "fp8": Method(write_fp8, read_fp8, LAYOUTS["fp8"]),
    "auto-round": Method(None, read_only_configs.read_auto_round, LAYOUTS["compressed-tensors"]),
    "fp-quant": Method(None, read_only_configs.read_fp_quant, read_only_configs.FP_QUANT),
}
_OTHER_NAMES = {"mxfp8": "fp8", "modelopt-mxfp8": "modelopt", "modelopt-fp4": "modelopt"}


def write_config(layout: Layout, modules: Mapping[str, Module]) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint.

    Args:
        layout: the layout of its tensors.
        modules: qualified name -> module, for each module that has a weight, quantized or not.

    Returns:
        The dictionary that goes into config.json.

    Raises:
        MXError: where the layout cannot hold the scheme of a module, or libraries would read another scheme.

    Example:
        >>> from pt2mx.pt2e.checkpoints.configs import read_config, write_config
        >>> from pt2mx.pt2e.checkpoints.layouts import layout_named
        >>> from pt2mx.pt2e.checkpoints.module_schemes import Module, Scheme
        >>> modules = {"fc": Module("Linear", Scheme("fp4_e2m1")), "head": Module("Linear", None)}
        >>> config = write_config(layout_named("compressed-tensors"), modules)
        >>> config["format"], config["config_groups"]["group_0"]["targets"], config["ignore"]
        ('mxfp4-pack-quantized', ['Linear'], ['head'])
        >>> read_config(config).of("fc").form
        'fp4_e2m1'
    """
    for name, module in modules.items():
        if module.scheme is not None:
            layout.check(name, module.scheme.form)
            if module.kind == EMBEDDING:
                layout.check_embedding(name, module.scheme.form)
            layout.check_inputs(name, module.scheme.form, module.scheme.inputs)
    write = _METHODS[layout.name].write
    assert write is not None  # a layout of `LAYOUTS`
    config = write(modules)
    schemes = read_config(config)
    for name, module in modules.items():
        read = schemes.of(name)
        stated, written = (one and (layout.by_grid or one.form) for one in (read, module.scheme))
        if module.kind == LINEAR and stated != written:
            raise MXError(
                f"loaders of {layout.name}, which match the beginning or the end of a name, would not tell {name} "
                "from another module: quantize both or none"
            )
    return config


def read_config(config: Mapping[str, Any]) -> Schemes:
    """Return the schemes that a `quantization_config` states.

    Args:
        config: the dictionary in config.json.

    Returns:
        The schemes.

    Raises:
        MXError: for an unknown method, a config that is malformed, and tensors that are not MX.
    """
    method = _method(config)
    if method not in _METHODS:
        raise MXError(f"quant_method {config.get('quant_method')!r} of the checkpoint is none of {', '.join(_METHODS)}")
    with user_errors(f"read the quantization_config of {method}"):
        return Schemes(_METHODS[method].layout, _METHODS[method].read(config), _block_of(config))


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` belongs to a known layout.

    Args:
        config: the dictionary in config.json.

    Returns:
        True where `read_config` reads its method.
    """
    return _method(config) in _METHODS


def _method(config: Mapping[str, Any]) -> str:
    method = str(config.get("quant_method", "")).lower().replace("_", "-")
    return _OTHER_NAMES.get(method, method)
