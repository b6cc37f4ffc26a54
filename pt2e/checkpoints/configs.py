"""The `quantization_config` of checkpoints, written and read in each layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pt2mx.errors import MXError
from pt2mx.pt2e.checkpoints import compressed_tensors_config, plain_configs, quark_config
from pt2mx.pt2e.checkpoints.layouts import LAYOUTS, Layout
from pt2mx.pt2e.checkpoints.schemes import EMBEDDING, LINEAR, Module, Rules, Schemes
from pt2mx.pt2e.user_errors import user_errors


@dataclass(frozen=True)
class Method:
    """The writer and the reader of a `quantization_config`."""

    write: Callable[[Mapping[str, Module]], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], Rules]


#: name of a layout, which is its `quant_method` -> how that is written and read
_METHODS = {
    "compressed-tensors": Method(compressed_tensors_config.write, compressed_tensors_config.read),
    "mxfp4": Method(plain_configs.write_mxfp4, plain_configs.read_mxfp4),
    "quark": Method(quark_config.write, quark_config.read),
    "modelopt": Method(plain_configs.write_modelopt, plain_configs.read_modelopt),
    "fp8": Method(plain_configs.write_fp8, plain_configs.read_fp8),
}
_OTHER_NAMES = {"mxfp8": "fp8", "modelopt-mxfp8": "modelopt"}


def write_config(layout: Layout, modules: Mapping[str, Module]) -> dict[str, Any]:
    """Give the `quantization_config` of a checkpoint.

    Args:
        layout: of its tensors.
        modules: qualified name -> each module that has a weight, quantized or not.

    Returns:
        The dictionary that goes into config.json.

    Raises:
        MXError: where the layout cannot hold a scheme, or readers would take another for it, naming the module.

    Example:
        >>> from pt2mx.pt2e.checkpoints.configs import read_config, write_config
        >>> from pt2mx.pt2e.checkpoints.layouts import layout_named
        >>> from pt2mx.pt2e.checkpoints.schemes import Module, Scheme
        >>> modules = {"fc": Module("Linear", Scheme("fp4_e2m1")), "head": Module("Linear", None)}
        >>> config = write_config(layout_named("compressed-tensors"), modules)
        >>> config["format"], config["config_groups"]["group_0"]["targets"], config["ignore"]
        ('mxfp4-pack-quantized', ['Linear'], ['head'])
        >>> read_config(config).of("fc").element
        'fp4_e2m1'
    """
    for name, module in modules.items():
        if module.scheme is not None:
            layout.check(name, module.scheme.element)
            if module.kind == EMBEDDING:
                layout.check_embedding(name, module.scheme.element)
            layout.check_inputs(name, module.scheme.inputs)
    config = _METHODS[layout.name].write(modules)
    schemes = read_config(config)
    for name, module in modules.items():
        found = schemes.of(name)
        if module.kind == LINEAR and (found and found.element) != (module.scheme and module.scheme.element):
            raise MXError(
                f"readers of {layout.name}, who take the beginning or the end of a name for it, would not tell {name} "
                "from another module: quantize both or none"
            )
    return config


def read_config(config: Mapping[str, Any]) -> Schemes:
    """Give the schemes that a `quantization_config` states.

    Args:
        config: that of config.json.

    Returns:
        The schemes.

    Raises:
        MXError: for a method that is no layout here, for what is not of its form, and for tensors that are not MX.
    """
    method = _method(config)
    if method not in _METHODS:
        raise MXError(f"quant_method {config.get('quant_method')!r} of the checkpoint is none of {', '.join(_METHODS)}")
    with user_errors(f"read the quantization_config of {method}"):
        return Schemes(LAYOUTS[method], _METHODS[method].read(config))


def is_known(config: Mapping[str, Any]) -> bool:
    """Say whether a `quantization_config` is that of a layout here.

    Args:
        config: that of config.json.

    Returns:
        True where `read_config` reads its method.
    """
    return _method(config) in _METHODS


def _method(config: Mapping[str, Any]) -> str:
    method = str(config.get("quant_method", "")).lower().replace("_", "-")
    return _OTHER_NAMES.get(method, method)
