"""Affine fake quantization to 8 bits by torchao's own modules, under the names of torch.ao's defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pt2mx.errors import MXError
from pt2mx.pt2e.observer import MXFakeQuantize, MXObserver
from pt2mx.pt2e.range_observers import MXHistogramObserver, MXMinMaxObserver, MXMovingAverageMinMaxObserver
from pt2mx.pt2e.torchao_pt2e import (
    FakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    fake_quantize,
)


def unwrapped(constructor: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class behind calls of `with_args`, and the arguments that they gave it."""
    keywords: dict[str, Any] = {}
    while (made := getattr(constructor, "p", None)) is not None:
        keywords = {**made.keywords, **keywords}
        constructor = made.func
    return constructor, keywords


def _with(constructor: Any, **changed: Any) -> Any:
    """`with_args` over others: torchao takes one, and not one over another."""
    made, keywords = unwrapped(constructor)
    return made.with_args(**keywords | changed) if keywords | changed else made


# in the dtypes of exported graphs, in their whole range; torchao's have those of quantized tensors
#: of activations: uint8, one scale and zero point
default_fake_quant = _with(fake_quantize.default_fake_quant, dtype=torch.uint8, reduce_range=False)
#: of weights: int8, one scale
default_weight_fake_quant = _with(fake_quantize.default_weight_fake_quant, dtype=torch.int8)
#: of weights: int8, a scale for each output channel
default_per_channel_weight_fake_quant = _with(fake_quantize.default_per_channel_weight_fake_quant, dtype=torch.int8)

#: observer of block formats -> torchao's that computes an affine scale of its statistics, of all values and by channel
_OF_STATISTICS: dict[Any, tuple[Any, Any]] = {
    MXMinMaxObserver: (MinMaxObserver, PerChannelMinMaxObserver),
    MXMovingAverageMinMaxObserver: (MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver),
    MXHistogramObserver: (HistogramObserver, HistogramObserver),
    MXFakeQuantize: (FakeQuantize, FakeQuantize),
}


def affine_constructor(constructor: Callable) -> Callable:
    """Return torchao's observer or fake quantizer for one of block formats; torchao's own as it is.

    Raises:
        MXError: for an observer that collects no range, and for what makes none.
    """
    if not callable(constructor):
        raise MXError(f"{constructor!r} makes no observer: give one of pt2bfp's or torchao's, or its with_args(...)")
    made, keywords = unwrapped(constructor)
    if not (isinstance(made, type) and issubclass(made, MXObserver)):
        return _with(constructor)
    if made not in _OF_STATISTICS:
        raise MXError(
            f"{made.__name__} computes no affine scale: take MinMaxObserver, MovingAverageMinMaxObserver, "
            "HistogramObserver, their PerChannel forms or default_fake_quant"
        )
    whole, by_channel = _OF_STATISTICS[made]
    if "observer" in keywords:
        keywords["observer"] = affine_constructor(keywords["observer"])
    return (whole if keywords.get("ch_axis") is None else by_channel).with_args(**keywords)
