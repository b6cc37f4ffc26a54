"""`prepare` and `convert`: replace the layers of an eager model, as the `qconfig` of their modules says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from pt2mx.errors import MXError
from pt2mx.pt2e.pt2bfp.layers import LAYERS, ObservedLayer, QuantizedLayer
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig, checked_config

Mapping = dict[type[nn.Module], type]

#: type of a layer -> the class whose `from_float` makes the quantized one. MX scales come from the values of each call,
#: so static and dynamic quantization are the same. A program can add its own classes.
DEFAULT_STATIC_QUANT_MODULE_MAPPINGS: Mapping = dict.fromkeys(LAYERS, QuantizedLayer)

#: module -> an attribute and its value; with it torch calls the layers inside the module instead of using their weights
_CALLING: dict[type[nn.Module], tuple[str, object]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def prepare(model: nn.Module, inplace: bool = False, allow_list: Iterable[type[nn.Module]] | None = None) -> nn.Module:
    """Insert observers into the layers of an eager model, after torch.ao's function of this name, which pt2-bfp has.

    A module without a `qconfig` inherits the `qconfig` of the module around it. None keeps a module in high precision.
    `allow_list` has the types of layers to prepare; None for all that have a quantized class. The prepared model
    computes in high precision. After `enable_fake_quant(model)` it computes as the converted model will.

    Raises:
        MXError: if no layer has a `qconfig`, for another `qconfig` or type of layer, and for affine quantization.
    """
    return _prepared(model, inplace, allow_list, lambda config: config)


def prepare_qat(model: nn.Module, mapping: Mapping | None = None, inplace: bool = False) -> nn.Module:
    """Insert fake quantization with a straight-through gradient into the layers of an eager model. The keys of
    `mapping` are the types of layers to prepare.

    Raises:
        MXError: as `prepare`.
    """
    return _prepared(model, inplace, mapping, lambda config: replace(config, is_qat=True))


def convert(
    module: nn.Module, mapping: Mapping | None = None, inplace: bool = False, remove_qconfig: bool = True
) -> nn.Module:
    """Replace the layers of a prepared eager model by quantized ones, after torch.ao's function of this name.

    `mapping` is `DEFAULT_STATIC_QUANT_MODULE_MAPPINGS` by default. Prepared layers of other types become float layers
    again. Layers that have a `qconfig` of their own are replaced too.

    Raises:
        MXError: for another object than a module, and a mapping to other classes.
    """
    mapping = DEFAULT_STATIC_QUANT_MODULE_MAPPINGS if mapping is None else mapping
    if not isinstance(mapping, dict) or not all(hasattr(made, "from_float") for made in mapping.values()):
        raise MXError(f"mapping={mapping!r} must be a dictionary: type of a layer -> class that has a from_float")
    module = _copied(module, inplace)

    def converted(layer: nn.Module) -> nn.Module | None:
        kind = layer.kind if isinstance(layer, ObservedLayer) else type(layer)
        if kind in mapping and vars(layer).get("qconfig") is not None:
            return mapping[kind].from_float(layer)  # type: ignore[attr-defined]
        return layer.restored() if isinstance(layer, ObservedLayer) else None

    module = _replaced(module, converted)
    if remove_qconfig:
        for each in module.modules():
            vars(each).pop("qconfig", None)
    return module


def quantize(
    model: nn.Module,
    run_fn: Callable[..., Any],
    run_args: Iterable[Any],
    mapping: Mapping | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Prepare an eager model in evaluation mode, calibrate it by `run_fn(model, *run_args)` and convert it, after
    torch.ao's function of this name."""
    model = _copied(model, inplace).eval()
    prepared = prepare(model, inplace=True)
    run_fn(prepared, *run_args)
    return convert(prepared, mapping, inplace=True)


def _prepared(
    model: nn.Module,
    inplace: bool,
    kinds: Iterable[type[nn.Module]] | None,
    adapted: Callable[[MXQuantizationConfig], MXQuantizationConfig],
) -> nn.Module:
    kinds = set(LAYERS if kinds is None else kinds)
    model = _copied(model, inplace)
    configs = _propagated(model, None)

    def observed(layer: nn.Module) -> nn.Module | None:
        config = configs.get(layer) if type(layer) in kinds else None
        return None if config is None else ObservedLayer(layer, adapted(config))

    prepared = _replaced(model, observed)
    if not any(isinstance(module, ObservedLayer) for module in prepared.modules()):
        raise MXError(
            "no layer that can be quantized has a qconfig: set it, as model.qconfig = QConfig(activation=..., "
            "weight=...); nn.MultiheadAttention and subclasses of torch's layers are quantized by prepare_fx"
        )
    return prepared


def _copied(model: nn.Module, inplace: bool) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise MXError(f"expected a module, not {type(model).__name__}")
    return model if inplace else copy.deepcopy(model)


def _propagated(module: nn.Module, inherited: object) -> dict[nn.Module, MXQuantizationConfig | None]:
    """Return the configs of a module and its submodules."""
    config = vars(module).get("qconfig", inherited)
    configs = {module: checked_config(config)}
    for child in module.children():
        configs |= _propagated(child, config)
    return configs


def _replaced(module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Replace a module, or the layers in it. A layer with several names is replaced once."""
    done: dict[nn.Module, nn.Module] = {}

    def replaced(each: nn.Module) -> nn.Module:
        if each not in done:
            done[each] = new = replacement(each) or each
            if new is each and not isinstance(each, nn.MultiheadAttention):  # it uses the weights of its layers
                for name, child in list(each._modules.items()):
                    if child is not None:
                        each._modules[name] = replaced(child)
                if type(each) in _CALLING and any(
                    isinstance(m, ObservedLayer | QuantizedLayer) for m in each.modules()
                ):
                    setattr(each, *_CALLING[type(each)])
        return done[each]

    return replaced(module)
