"""pt2-bfp's surface: the names of d-Matrix's block floating point quantizer (`dmx.compressor.pt2bfp`) over this flow.

A program written for it runs with its imports changed to `pt2mx.pt2e.pt2bfp`, on a model that `torch.export` exported.
`BFPQuantizer` is `MXQuantizer`: set configs on it, or subclass it with an `annotate` of one's own, whose annotations
`get_input_act_qspec` and its kin make. What differs: blocks run along the axis of the format, or the one that an
operator reduces; the scale of a block comes from its values, so that observers change no number, and `eps`, `qscheme`
and the like have no effect; `fx`, `torchao` and the Triton kernels of that package are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from torch import nn

from pt2mx.errors import MXError
from pt2mx.pt2e.convert import convert_pt2e
from pt2mx.pt2e.observer import (
    MXFakeQuantize,
    MXObserver,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
)
from pt2mx.pt2e.prepare import prepare_pt2e, prepare_qat_pt2e
from pt2mx.pt2e.qspec import mx_qspec
from pt2mx.pt2e.quantizer.config import ROLES, MXQuantizationConfig
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.range_observers import MXHistogramObserver, MXMinMaxObserver, MXMovingAverageMinMaxObserver
from pt2mx.pt2e.report.check_diff import check_diff
from pt2mx.pt2e.torchao_pt2e import (
    OperatorConfig,
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
    annotate_input_qspec_map,
    annotate_output_qspec,
)
from pt2mx.spec import MXSpec, parse

__all__ = [
    "BFPOperatorConfig",
    "BFPQuantizationAnnotation",
    "BFPQuantizationConfig",
    "BFPQuantizationSpec",
    "BFPQuantizer",
    "FakeQuantize",
    "Format",
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "QConfig",
    "QConfigMapping",
    "SharedBFPQuantizationSpec",
    "annotate_input_qspec_map",
    "annotate_output_qspec",
    "check_diff",
    "convert_pt2e",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "get_bias_qspec",
    "get_input_act_qspec",
    "get_output_act_qspec",
    "get_weight_qspec",
    "prepare_pt2e",
    "prepare_qat_pt2e",
]

BFPQuantizer = QConfigMapping = MXQuantizer
BFPQuantizationAnnotation = QuantizationAnnotation
SharedBFPQuantizationSpec = SharedQuantizationSpec
BFPOperatorConfig = OperatorConfig
_annotate_input_qspec_map, _annotate_output_qspec = annotate_input_qspec_map, annotate_output_qspec
Format = SimpleNamespace(from_shorthand=parse)

PlaceholderObserver = MXObserver
MinMaxObserver = MXMinMaxObserver
PerChannelMinMaxObserver = MXMinMaxObserver.with_args(ch_axis=0)
MovingAverageMinMaxObserver = MXMovingAverageMinMaxObserver
MovingAveragePerChannelMinMaxObserver = MXMovingAverageMinMaxObserver.with_args(ch_axis=0)
HistogramObserver = MXHistogramObserver
FakeQuantize = MXFakeQuantize

#: what pt2-bfp quantizes to where nothing is said
DEFAULT_FORMAT = parse("BFP[8|8]{64}(SN)")


@dataclass(frozen=True)
class BFPQuantizationSpec:
    """The format of a tensor, `dtype` as `pt2mx.parse` takes it, and what observes it. The other fields are those of
    torch.ao's `QuantizationSpec`, without effect."""

    dtype: MXSpec = DEFAULT_FORMAT
    observer_or_fake_quant_ctr: Callable | None = None
    qscheme: object = None
    ch_axis: int | None = None
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", parse(self.dtype))


def BFPQuantizationConfig(
    input_activation: BFPQuantizationSpec | None,
    output_activation: BFPQuantizationSpec | None,
    weight: BFPQuantizationSpec | None,
    bias: BFPQuantizationSpec | None,
    is_qat: bool = False,
) -> MXQuantizationConfig:
    """The config of four specs, None leaving a role in high precision."""
    given = {"activation": input_activation, "output": output_activation, "weight": weight, "bias": bias}
    for role, spec in given.items():
        if spec is not None and not isinstance(spec, BFPQuantizationSpec):
            raise MXError(f"{role}: expected a BFPQuantizationSpec or None, not {spec!r}")
    specs = {role: spec for role, spec in given.items() if spec is not None}
    return MXQuantizationConfig(
        **{role: spec.dtype for role, spec in specs.items()},
        is_qat=is_qat,
        observer={r: s.observer_or_fake_quant_ctr for r, s in specs.items() if s.observer_or_fake_quant_ctr} or None,
    )


def QConfig(activation: object, weight: object) -> MXQuantizationConfig:
    """The config of two observers, each in the format that is its `dtype`, or else in `DEFAULT_FORMAT`; None or
    `nn.Identity` leaves a role in high precision."""
    given = {"activation": activation, "weight": weight}
    observers = {role: observer for role, observer in given.items() if observer not in (None, nn.Identity)}
    specs = {role: _argument(observer, "dtype", DEFAULT_FORMAT) for role, observer in observers.items()}
    return MXQuantizationConfig(**specs, observer=observers)


def get_input_act_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    """The annotation of a computed operand by a config, in blocks along `axis`, by default that of its format. None
    where it stays in high precision."""
    return _qspec(config, "activation", axis)


def get_output_act_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    """The same of a result."""
    return _qspec(config, "output", axis)


def get_weight_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    """The same of a constant operand."""
    return _qspec(config, "weight", axis)


def get_bias_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    """The same of a bias."""
    return _qspec(config, "bias", axis)


def _argument(constructor: object, name: str, default: object) -> object:
    """What `with_args` gave a constructor as an argument."""
    while (made := getattr(constructor, "p", None)) is not None:
        if name in made.keywords:
            return made.keywords[name]
        constructor = made.func
    return default


def _qspec(config: MXQuantizationConfig | None, role: str, axis: int | None) -> QuantizationSpec | None:
    if config is not None and not isinstance(config, MXQuantizationConfig):
        raise MXError(f"expected an MXQuantizationConfig or None, not {config!r}; its roles are {', '.join(ROLES)}")
    spec = None if config is None else getattr(config, role)
    if spec is None:
        return None
    return mx_qspec(spec if axis is None else spec.replace(axis=axis), config.module_of(role), config.ste)
