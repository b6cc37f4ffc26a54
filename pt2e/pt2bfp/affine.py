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
)

#: of activations: uint8, one scale and zero point
default_fake_quant = FakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver,
    quant_min=0,
    quant_max=255,
    dtype=torch.uint8,
    qscheme=torch.per_tensor_affine,
)
#: of weights: int8, one scale
default_weight_fake_quant = FakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.int8,
    qscheme=torch.per_tensor_symmetric,
)
#: of weights: int8, a scale for each output channel
default_per_channel_weight_fake_quant = FakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.int8,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
)

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
        MXError: for an observer that collects no range.
    """
    made, keywords = unwrapped(constructor)
    if not (isinstance(made, type) and issubclass(made, MXObserver)):
        return constructor
    if made not in _OF_STATISTICS:
        raise MXError(
            f"{made.__name__} computes no affine scale: take MinMaxObserver, MovingAverageMinMaxObserver, "
            "HistogramObserver, their PerChannel forms or default_fake_quant"
        )
    whole, by_channel = _OF_STATISTICS[made]
    if "observer" in keywords:
        keywords["observer"] = affine_constructor(keywords["observer"])
    return (whole if keywords.get("ch_axis") is None else by_channel).with_args(**keywords)


def unwrapped(constructor: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class behind calls of `with_args`, and the arguments that they gave it."""
    keywords: dict[str, Any] = {}
    while (made := getattr(constructor, "p", None)) is not None:
        keywords = {**made.keywords, **keywords}
        constructor = made.func
    return constructor, keywords
