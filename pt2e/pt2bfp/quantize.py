"""`prepare` and `convert`: replace the layers of an eager model, as the `qconfig` of their modules says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from pt2mx.errors import MXError
from pt2mx.pt2e.pt2bfp.layers import LAYERS, ObservedLayer, QuantizedLayer
from pt2mx.pt2e.pt2bfp.quantization_mapping import DEFAULT_STATIC_QUANT_MODULE_MAPPINGS, Mapping
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig, checked_config

#: module -> an attribute and its value; with it torch calls the layers inside the module instead of using their weights
_CALLING: dict[type[nn.Module], tuple[str, object]] = {
    nn.TransformerEncoderLayer: ("activation_relu_or_gelu", 0),
    nn.TransformerEncoder: ("use_nested_tensor", False),
}


def prepare(
    model: nn.Module,
    inplace: bool = False,
    allow_list: Iterable[type[nn.Module]] | None = None,
    observer_non_leaf_module_list: None = None,
    prepare_custom_config_dict: None = None,
) -> nn.Module:
    """Insert observers into the layers of an eager model, after torch.ao's function of this name, which pt2-bfp has.

    A module without a `qconfig` inherits the `qconfig` of the module around it. None keeps a module in high precision.

    Args:
        model: a module whose modules have a `qconfig`, as `QConfig` or `BFPQuantizationConfig` returns it.
        inplace: whether to change the model itself instead of a copy.
        allow_list: the types of layers to prepare; None for all that have a quantized class.
        observer_non_leaf_module_list, prepare_custom_config_dict: None.

    Returns:
        The prepared model. It computes in high precision and collects statistics. After `enable_fake_quant(model)` it
        computes as the converted model will.

    Raises:
        MXError: if no layer has a `qconfig`, for another `qconfig` or type of layer, for affine quantization, and for
            custom modules.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e import pt2bfp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).eval()
        >>> model.qconfig, model[1].qconfig = pt2bfp.QConfig(pt2bfp.MinMaxObserver, pt2bfp.MinMaxObserver), None
        >>> prepared = pt2bfp.prepare(model)
        >>> y = prepared(torch.ones(2, 64))
        >>> [type(layer).__name__ for layer in prepared]
        ['ObservedLayer', 'Linear']
    """
    _check_none(observer_non_leaf_module_list, prepare_custom_config_dict)
    return _prepared(model, inplace, allow_list, lambda config: config)


def prepare_qat(model: nn.Module, mapping: Mapping | None = None, inplace: bool = False) -> nn.Module:
    """Insert fake quantization with a straight-through gradient into the layers of an eager model.

    Args:
        model: as `prepare` takes it.
        mapping: a dictionary whose keys are the types of layers to prepare; None for all that have a quantized class.
        inplace: whether to change the model itself instead of a copy.

    Returns:
        The prepared model, to be trained like any module; `convert` converts it.

    Raises:
        MXError: as `prepare`.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e import pt2bfp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
        >>> model.qconfig = pt2bfp.QConfig(pt2bfp.MinMaxObserver, pt2bfp.MinMaxObserver)
        >>> qat = pt2bfp.prepare_qat(model)
        >>> qat(torch.ones(2, 64)).sum().backward()
        >>> qat[0].weight.grad.shape
        torch.Size([8, 64])
    """
    return _prepared(model, inplace, mapping, lambda config: replace(config, is_qat=True))


def convert(
    module: nn.Module,
    mapping: Mapping | None = None,
    inplace: bool = False,
    remove_qconfig: bool = True,
    is_reference: bool = False,
    convert_custom_config_dict: None = None,
    use_precomputed_fake_quant: bool = False,
) -> nn.Module:
    """Replace the layers of a prepared eager model by quantized ones, after torch.ao's function of this name.

    Args:
        module: the result of `prepare` or `prepare_qat`. The function also replaces layers with their own `qconfig`.
        mapping: type of a layer -> class whose `from_float` makes the quantized one; None for the mapping of static
            quantization. Prepared layers of other types become float layers again.
        inplace: whether to change the module itself instead of a copy.
        remove_qconfig: whether to remove the `qconfig`s.
        is_reference, use_precomputed_fake_quant: without effect, as in torch.ao's signature: the quantized layers are
            the reference, and a scale comes from the values.
        convert_custom_config_dict: None.

    Returns:
        The converted model.

    Raises:
        MXError: for another object than a module, a mapping to other classes, and custom modules.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e import pt2bfp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8)).eval()
        >>> model.qconfig = pt2bfp.QConfig(pt2bfp.MinMaxObserver, pt2bfp.MinMaxObserver)
        >>> prepared = pt2bfp.prepare(model)
        >>> converted = pt2bfp.convert(prepared)
        >>> pt2bfp.enable_fake_quant(prepared)
        >>> torch.equal(converted(torch.ones(2, 64)), prepared(torch.ones(2, 64)))
        True
    """
    _check_none(convert_custom_config_dict)
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
    """Prepare an eager model, calibrate it and convert it, after torch.ao's function of this name.

    Args:
        model: as in `prepare`. The function sets it to evaluation mode.
        run_fn: called with the prepared model and `run_args`.
        run_args: the other arguments.
        mapping: as in `convert`.
        inplace: whether to change the model itself instead of a copy.

    Returns:
        The converted model.

    Raises:
        MXError: as `prepare` and `convert`.

    Example:
        >>> import torch
        >>> from pt2mx.pt2e import pt2bfp
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
        >>> model.qconfig = pt2bfp.QConfig(pt2bfp.MinMaxObserver, pt2bfp.MinMaxObserver)
        >>> type(pt2bfp.quantize(model, lambda m, x: m(x), [torch.ones(2, 64)])[0]).__name__
        'QuantizedLayer'
    """
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


def _check_none(*customs: object) -> None:
    for custom in customs:
        if custom is not None:
            raise MXError(f"{custom!r} of custom modules must be None: set their qconfig, and their class in a mapping")
