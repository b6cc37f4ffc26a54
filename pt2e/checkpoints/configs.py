"""The `quantization_config` of checkpoints, written and read in each layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints import (
    compressed_tensors_config,
    modelopt_config,
    quark_config,
    read_only_configs,
    transform_config,
)
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.models.layouts import LAYOUTS, Layout
from pt2mx.pt2e.models.module_schemes import (
    EMBEDDING,
    EXPERTS,
    LINEAR,
    Module,
    Rules,
    Scheme,
    Schemes,
    always,
    not_converted,
    unquantized,
)
from pt2mx.pt2e.models.weight_formats import BLOCK, spec_of


def write_mxfp4(modules: Mapping[str, Module]) -> dict[str, Any]:
    """Write the modules that are not quantized: all but experts."""
    embeddings = [name for name, module in modules.items() if module.kind == EMBEDDING]
    return {"quant_method": "mxfp4", "modules_to_not_convert": [*unquantized(modules), *embeddings]}


def read_mxfp4(config: Mapping[str, Any]) -> Rules:
    """Read the rules of gpt-oss, which quantizes only experts."""
    return [(not_converted(config), None), (lambda name, kind: kind == EXPERTS, Scheme("fp4_e2m1"))]


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
        floats = any(spec_of(form).scale_dtype == torch.float32 for form in forms)
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


def _block_of(config: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    """Return the `weight_block_size` of a configuration, or the default.

    Raises:
        MXError: where it is no pair of numbers.
    """
    block = config.get("weight_block_size") or default
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise MXError(f"weight_block_size {block!r} of the checkpoint: expected the rows and columns of a block")
    return block[0], block[1]


@dataclass(frozen=True)
class Method:
    """A kind of `quantization_config`: the functions that write and read it, the layout of its tensors, and the rows
    and columns of a block where it states none."""

    write: Callable[[Mapping[str, Module]], dict[str, Any]] | None
    read: Callable[[Mapping[str, Any]], Rules]
    layout: Layout
    block: tuple[int, int] = (1, BLOCK)


#: `quant_method`, which is the name of a layout that is written -> its functions
_METHODS = {
    "compressed-tensors": Method(
        compressed_tensors_config.write, compressed_tensors_config.read, LAYOUTS["compressed-tensors"]
    ),
    "mxfp4": Method(write_mxfp4, read_mxfp4, LAYOUTS["mxfp4"]),
    "quark": Method(quark_config.write, quark_config.read, LAYOUTS["quark"]),
    "modelopt": Method(modelopt_config.write, modelopt_config.read, LAYOUTS["modelopt"], (128, 128)),
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
        The dictionary that goes into config.json; empty for GGUF, which states the type of each tensor.

    Raises:
        MXError: where the layout cannot hold the scheme of a module, or libraries would read another scheme.

    Example:
        >>> from pt2mx.pt2e.checkpoints.configs import read_config, write_config
        >>> from pt2mx.pt2e.models.layouts import layout_named
        >>> from pt2mx.pt2e.models.module_schemes import Module, Scheme
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
    method = _METHODS.get(layout.name)
    if method is None or method.write is None:
        return {}
    config = method.write(modules)
    schemes = read_config(config)
    for name, module in modules.items():
        read = schemes.of(name)
        stated, written = (one and (one.form in layout.by_grid or one.form) for one in (read, module.scheme))
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
        known = _METHODS[method]
        block = _block_of(config, known.block)
        return Schemes(known.layout, known.read(config), block, transform_config.read(config))


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
