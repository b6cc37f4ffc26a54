"""The specs of a config: a block format with an observer, or affine quantization to 8 bits by torchao's modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pt2mx.errors import MXError
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.pt2e.observe.range_observers import MXHistogramObserver, MXMinMaxObserver, MXMovingAverageMinMaxObserver
from pt2mx.pt2e.observe.torchao_pt2e import (
    FakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    QuantizationSpec,
    fake_quantize,
)
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.spec import MXSpec, parse

#: the default format of a spec
DEFAULT_FORMAT = parse("BFP[8|8]{64}(SN)")
#: dtypes of affine quantization; they include the dtypes of torch.ao's observers
_AFFINE = {torch.uint8: torch.uint8, torch.quint8: torch.uint8, torch.int8: torch.int8, torch.qint8: torch.int8}


def unwrapped(constructor: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class behind calls of `with_args`, and the arguments of these calls."""
    keywords: dict[str, Any] = {}
    while (partial := getattr(constructor, "p", None)) is not None:
        keywords = {**partial.keywords, **keywords}
        constructor = partial.func
    return constructor, keywords


def _with(constructor: Any, **changed: Any) -> Any:
    """Apply `with_args` to the class itself: torchao does not support nested `with_args`."""
    observer, keywords = unwrapped(constructor)
    return observer.with_args(**keywords | changed) if keywords | changed else observer


# torchao's fake quantizers have the dtypes of quantized tensors; these have the dtypes of exported graphs, with the
# whole range
#: for activations: uint8, one scale and zero point
default_fake_quant = _with(fake_quantize.default_fake_quant, dtype=torch.uint8, reduce_range=False)
#: for weights: int8, one scale
default_weight_fake_quant = _with(fake_quantize.default_weight_fake_quant, dtype=torch.int8)
#: for weights: int8, a scale for each output channel
default_per_channel_weight_fake_quant = _with(fake_quantize.default_per_channel_weight_fake_quant, dtype=torch.int8)

#: observer of block formats -> torchao's observers that compute an affine scale from its statistics, per tensor and per
#: channel
_AFFINE_OBSERVERS: dict[Any, tuple[Any, Any]] = {
    MXMinMaxObserver: (MinMaxObserver, PerChannelMinMaxObserver),
    MXMovingAverageMinMaxObserver: (MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver),
    MXHistogramObserver: (HistogramObserver, HistogramObserver),
    MXFakeQuantize: (FakeQuantize, FakeQuantize),
}


def affine_constructor(constructor: Callable) -> Callable:
    """Return torchao's observer or fake quantizer for one of block formats; torchao's own ones are returned unchanged.

    Raises:
        MXError: for an observer that collects no range, and for an object that makes no observer.
    """
    if not callable(constructor):
        raise MXError(f"{constructor!r} makes no observer: give one of pt2bfp's or torchao's, or its with_args(...)")
    observer, keywords = unwrapped(constructor)
    if not (isinstance(observer, type) and issubclass(observer, MXObserver)):
        return _with(constructor)
    if observer not in _AFFINE_OBSERVERS:
        raise MXError(
            f"{observer.__name__} computes no affine scale: take MinMaxObserver, MovingAverageMinMaxObserver, "
            "HistogramObserver, their PerChannel forms or default_fake_quant"
        )
    per_tensor, per_channel = _AFFINE_OBSERVERS[observer]
    if "observer" in keywords:
        keywords["observer"] = affine_constructor(keywords["observer"])
    return (per_tensor if keywords.get("ch_axis") is None else per_channel).with_args(**keywords)


@dataclass(frozen=True)
class BFPQuantizationSpec:
    """The format of a tensor and the observer that calibration inserts, after pt2-bfp's `BFPQuantizationSpec`.

    `dtype` is a format as `pt2mx.parse` takes it; `torch.uint8` and `torch.int8` mean affine quantization by torchao's
    observers and fake quantizers. The observer is one of this package, or the result of its `with_args`; None for
    `PlaceholderObserver`. For affine quantization torchao's observer of the same name is used, or one of torchao's own;
    None for `default_fake_quant` (uint8) and `default_weight_fake_quant` (int8). The other fields are those of
    torch.ao's `QuantizationSpec`, without effect on a block format.

    Raises:
        MXError: for an unknown spelling.
    """

    dtype: MXSpec | torch.dtype = DEFAULT_FORMAT
    observer_or_fake_quant_ctr: Callable | None = None
    qscheme: object = None
    ch_axis: int | None = None
    is_dynamic: bool = False

    if TYPE_CHECKING:  # the field `dtype` has another type than the argument

        def __init__(
            self,
            dtype: object = DEFAULT_FORMAT,
            observer_or_fake_quant_ctr: Callable | None = None,
            qscheme: object = None,
            ch_axis: int | None = None,
            is_dynamic: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        affine = _AFFINE.get(self.dtype) if isinstance(self.dtype, torch.dtype) else None
        object.__setattr__(self, "dtype", affine or parse(self.dtype))

    @property
    def affine(self) -> QuantizationSpec | None:
        """Return torchao's spec for affine quantization; None for a block format."""
        if not isinstance(self.dtype, torch.dtype):
            return None
        defaults = {torch.uint8: default_fake_quant, torch.int8: default_weight_fake_quant}
        constructor = affine_constructor(self.observer_or_fake_quant_ctr or defaults[self.dtype])
        keywords, info = unwrapped(constructor)[1], torch.iinfo(self.dtype)
        ch_axis = keywords.get("ch_axis") if self.ch_axis is None else self.ch_axis
        scheme = torch.per_tensor_affine if keywords.get("ch_axis") is None else torch.per_channel_affine
        return QuantizationSpec(
            dtype=self.dtype,
            observer_or_fake_quant_ctr=constructor,
            quant_min=keywords.get("quant_min", info.min),
            quant_max=keywords.get("quant_max", info.max),
            qscheme=self.qscheme or keywords.get("qscheme", scheme),
            ch_axis=ch_axis,
            is_dynamic=self.is_dynamic,
        )


@dataclass(frozen=True)
class BFPConfig(MXQuantizationConfig):
    """An `MXQuantizationConfig` that may quantize some roles affinely: `BFPQuantizationConfig` and `QConfig` return it.

    Args:
        affine: (role, torchao's spec) pairs. These roles have no MX spec.
    """

    affine: tuple[tuple[str, QuantizationSpec], ...] = ()

    if TYPE_CHECKING:

        def __init__(self, *, affine: tuple[tuple[str, QuantizationSpec], ...] = (), **fields: Any) -> None: ...

    def to_dict(self) -> dict[str, object]:
        """Return the fields that differ from their defaults, affine roles by their dtype.

        Returns:
            A dictionary as `MXQuantizationConfig.to_dict` returns it. With affine roles it cannot be read back.
        """
        return super().to_dict() | {role: str(spec.dtype) for role, spec in self.affine}


def config_of(specs: dict[str, BFPQuantizationSpec | None], is_qat: bool = False) -> BFPConfig:
    """Return the config for the specs of the roles."""
    present = {role: spec for role, spec in specs.items() if spec is not None}
    for role, spec in present.items():
        if not isinstance(spec, BFPQuantizationSpec):
            raise MXError(f"{role}: expected a BFPQuantizationSpec or None, not {spec!r}")
    affine = tuple((role, spec.affine) for role, spec in present.items() if spec.affine is not None)
    blocked = {role: spec for role, spec in present.items() if spec.affine is None}
    formats: dict[str, Any] = {role: spec.dtype for role, spec in blocked.items()}
    observers = {r: s.observer_or_fake_quant_ctr for r, s in blocked.items() if s.observer_or_fake_quant_ctr}
    return BFPConfig(affine=affine, is_qat=is_qat, observer=observers or None, **formats)


def BFPQuantizationConfig(
    input_activation: BFPQuantizationSpec | None,
    output_activation: BFPQuantizationSpec | None,
    weight: BFPQuantizationSpec | None,
    bias: BFPQuantizationSpec | None,
    is_qat: bool = False,
) -> MXQuantizationConfig:
    """Return the config of an operator, after pt2-bfp's class of this name. None means high precision; `is_qat` fake
    quantizes from the start.

    Raises:
        MXError: for another object than a `BFPQuantizationSpec`, or an observer of another library.
    """
    specs = {"activation": input_activation, "output": output_activation, "weight": weight, "bias": bias}
    return config_of(specs, is_qat)


def QConfig(activation: object, weight: object) -> MXQuantizationConfig:
    """Return the config of an operator for its observers, after torch.ao's `QConfig`, which pt2-bfp uses.

    The format of an observer is its `dtype`, by default `DEFAULT_FORMAT`. For affine quantization it is one of
    torchao's, with a `dtype` of 8 bits. None or `nn.Identity` leaves the role in high precision.

    Raises:
        MXError: for an unknown format, or an observer of another library.
    """
    observers: dict[str, Any] = {"activation": activation, "weight": weight}
    return config_of(
        {
            role: BFPQuantizationSpec(unwrapped(observer)[1].get("dtype", DEFAULT_FORMAT), observer)
            for role, observer in observers.items()
            if observer not in (None, nn.Identity)
        }
    )
