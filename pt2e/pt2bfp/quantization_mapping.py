"""Mappings from the type of a layer to the class that replaces it when an eager model is converted.

MX scales come from the values of each call. Static and dynamic quantization are therefore the same, and one class
replaces all layers. A program can add its own classes to a mapping.
"""

from __future__ import annotations

from torch import nn

from pt2mx.errors import MXError
from pt2mx.pt2e.pt2bfp.layers import LAYERS, QuantizedLayer

Mapping = dict[type[nn.Module], type]

DEFAULT_STATIC_QUANT_MODULE_MAPPINGS: Mapping = dict.fromkeys(LAYERS, QuantizedLayer)
#: the layers that torch.ao quantizes dynamically
DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS: Mapping = dict.fromkeys(
    (nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell, nn.EmbeddingBag, nn.Embedding), QuantizedLayer
)


_MAPPING = """Return a copy of the mapping of {kind} quantization.

    Returns:
        Type of a layer -> class with `from_float`.

    Example:
        >>> from torch import nn
        >>> from pt2mx.pt2e import pt2bfp
        >>> pt2bfp.{name}()[nn.Linear].__name__
        'QuantizedLayer'
"""
_CLASS = """Return the class that replaces a layer in {kind} quantization.

    Args:
        float_module_class: the type of the layer.
        additional_{kind}_quant_mapping: entries that override the mapping's.

    Returns:
        A class with `from_float`.

    Raises:
        MXError: for a type without one.

    Example:
        >>> from torch import nn
        >>> from pt2mx.pt2e import pt2bfp
        >>> pt2bfp.{name}(nn.LSTM).__name__
        'QuantizedLayer'
"""


def get_default_static_quant_module_mappings() -> Mapping:
    return dict(DEFAULT_STATIC_QUANT_MODULE_MAPPINGS)


def get_default_dynamic_quant_module_mappings() -> Mapping:
    return dict(DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS)


def get_static_quant_module_class(
    float_module_class: type[nn.Module], additional_static_quant_mapping: Mapping | None = None
) -> type:
    return _class_of(float_module_class, DEFAULT_STATIC_QUANT_MODULE_MAPPINGS, additional_static_quant_mapping)


def get_dynamic_quant_module_class(
    float_module_class: type[nn.Module], additional_dynamic_quant_mapping: Mapping | None = None
) -> type:
    return _class_of(float_module_class, DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS, additional_dynamic_quant_mapping)


_FUNCTIONS = {
    "static": {_MAPPING: get_default_static_quant_module_mappings, _CLASS: get_static_quant_module_class},
    "dynamic": {_MAPPING: get_default_dynamic_quant_module_mappings, _CLASS: get_dynamic_quant_module_class},
}
for _kind, _functions in _FUNCTIONS.items():
    for _docstring, _function in _functions.items():
        _function.__doc__ = _docstring.format(kind=_kind, name=_function.__name__)


def _class_of(kind: type[nn.Module], mapping: Mapping, additional: Mapping | None) -> type:
    mapping = {**mapping, **(additional or {})}
    if kind not in mapping:
        allowed = ", ".join(known.__name__ for known in mapping)
        raise MXError(f"no quantized class for {getattr(kind, '__name__', kind)!r}: there are some for {allowed}")
    return mapping[kind]
