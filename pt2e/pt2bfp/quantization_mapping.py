"""Mappings from a layer's type to the class that takes its place when an eager model is converted.

MX scales come from the values of each call, so that static and dynamic quantization are the same and one class replaces
all layers; a program can put classes of its own into a mapping.
"""

from __future__ import annotations

from torch import nn

from pt2mx.errors import MXError
from pt2mx.pt2e.pt2bfp.layers import LAYERS, QuantizedLayer

DEFAULT_STATIC_QUANT_MODULE_MAPPINGS: dict[type[nn.Module], type] = dict.fromkeys(LAYERS, QuantizedLayer)
#: the layers that torch.ao quantizes dynamically
DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS: dict[type[nn.Module], type] = dict.fromkeys(
    (nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell, nn.EmbeddingBag, nn.Embedding), QuantizedLayer
)


def get_default_static_quant_module_mappings() -> dict[type[nn.Module], type]:
    """Return the mapping of static quantization.

    Returns:
        Type of a layer -> class with `from_float`, a copy.

    Example:
        >>> from torch import nn
        >>> from pt2mx.pt2e import pt2bfp
        >>> pt2bfp.get_default_static_quant_module_mappings()[nn.Conv2d].__name__
        'QuantizedLayer'
    """
    return dict(DEFAULT_STATIC_QUANT_MODULE_MAPPINGS)


def get_default_dynamic_quant_module_mappings() -> dict[type[nn.Module], type]:
    """Return the mapping of dynamic quantization: linear and recurrent layers, cells and embeddings.

    Returns:
        Type of a layer -> class with `from_float`, a copy.

    Example:
        >>> from torch import nn
        >>> from pt2mx.pt2e import pt2bfp
        >>> nn.Conv2d in pt2bfp.get_default_dynamic_quant_module_mappings()
        False
    """
    return dict(DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS)


def get_static_quant_module_class(
    float_module_class: type[nn.Module], additional_static_quant_mapping: dict[type[nn.Module], type] | None = None
) -> type:
    """Return the class that takes the place of a layer in static quantization.

    Args:
        float_module_class: the type of the layer.
        additional_static_quant_mapping: entries that go before those of the mapping.

    Returns:
        A class with `from_float`.

    Raises:
        MXError: for a type without one.

    Example:
        >>> from torch import nn
        >>> from pt2mx.pt2e import pt2bfp
        >>> pt2bfp.get_static_quant_module_class(nn.Linear) is pt2bfp.get_dynamic_quant_module_class(nn.Linear)
        True
    """
    return _class_of(float_module_class, DEFAULT_STATIC_QUANT_MODULE_MAPPINGS, additional_static_quant_mapping)


def get_dynamic_quant_module_class(
    float_module_class: type[nn.Module], additional_dynamic_quant_mapping: dict[type[nn.Module], type] | None = None
) -> type:
    """Return the class that takes the place of a layer in dynamic quantization.

    Args:
        float_module_class: the type of the layer.
        additional_dynamic_quant_mapping: entries that go before those of the mapping.

    Returns:
        A class with `from_float`.

    Raises:
        MXError: for a type without one.

    Example:
        >>> from torch import nn
        >>> from pt2mx.pt2e import pt2bfp
        >>> pt2bfp.get_dynamic_quant_module_class(nn.LSTM).__name__
        'QuantizedLayer'
    """
    return _class_of(float_module_class, DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS, additional_dynamic_quant_mapping)


def _class_of(kind: type[nn.Module], mapping: dict, additional: dict | None) -> type:
    mapping = {**mapping, **(additional or {})}
    if kind not in mapping:
        allowed = ", ".join(known.__name__ for known in mapping)
        raise MXError(f"no quantized class for {getattr(kind, '__name__', kind)!r}: there are some for {allowed}")
    return mapping[kind]
