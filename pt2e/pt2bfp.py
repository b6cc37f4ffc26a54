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
from typing import TYPE_CHECKING, Any, TypeVar

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
    """The format of a tensor and the observer that calibration inserts, after pt2-bfp's `BFPQuantizationSpec`.

    Args:
        dtype: as `pt2mx.parse` takes it; kept as an `MXSpec`.
        observer_or_fake_quant_ctr: an observer of this module, or what its `with_args` returns; None for
            `PlaceholderObserver`.
        qscheme, ch_axis, is_dynamic: those of torch.ao's `QuantizationSpec`, without effect.

    Raises:
        MXError: for an unknown spelling.

    Example:
        >>> from pt2mx.pt2e import pt2bfp
        >>> spec = pt2bfp.BFPQuantizationSpec("BFP[12|8]{16}(SN)", pt2bfp.HistogramObserver)
        >>> print(spec.dtype)
        mxint12{16}
    """

    dtype: MXSpec = DEFAULT_FORMAT
    observer_or_fake_quant_ctr: Callable | None = None
    qscheme: object = None
    ch_axis: int | None = None
    is_dynamic: bool = False

    if TYPE_CHECKING:  # `dtype` is what becomes of the argument

        def __init__(
            self,
            dtype: object = DEFAULT_FORMAT,
            observer_or_fake_quant_ctr: Callable | None = None,
            qscheme: object = None,
            ch_axis: int | None = None,
            is_dynamic: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", parse(self.dtype))


def BFPQuantizationConfig(
    input_activation: BFPQuantizationSpec | None,
    output_activation: BFPQuantizationSpec | None,
    weight: BFPQuantizationSpec | None,
    bias: BFPQuantizationSpec | None,
    is_qat: bool = False,
) -> MXQuantizationConfig:
    """Return the config of an operator, after pt2-bfp's class of this name.

    Args:
        input_activation: of computed operands; None leaves these, or any of the others, in high precision.
        output_activation: of the result.
        weight: of constant operands.
        bias: of the bias.
        is_qat: true for fake quantization from the start, in quantization-aware training.

    Returns:
        A `pt2mx.MXQuantizationConfig`.

    Raises:
        MXError: for another object than a `BFPQuantizationSpec`, or an observer of another library.

    Example:
        >>> from pt2mx.pt2e import pt2bfp
        >>> spec = pt2bfp.BFPQuantizationSpec("BFP[8|8]{64}(SN)")
        >>> pt2bfp.BFPQuantizationConfig(spec, None, spec, None).to_dict()
        {'activation': 'mxint8{64}', 'weight': 'mxint8{64}'}
    """
    given = {"activation": input_activation, "output": output_activation, "weight": weight, "bias": bias}
    for role, spec in given.items():
        if spec is not None and not isinstance(spec, BFPQuantizationSpec):
            raise MXError(f"{role}: expected a BFPQuantizationSpec or None, not {spec!r}")
    specs = {role: spec for role, spec in given.items() if spec is not None}
    formats: dict[str, Any] = {role: spec.dtype for role, spec in specs.items()}
    observers = {r: s.observer_or_fake_quant_ctr for r, s in specs.items() if s.observer_or_fake_quant_ctr}
    return MXQuantizationConfig(**formats, is_qat=is_qat, observer=observers or None)


def QConfig(activation: object, weight: object) -> MXQuantizationConfig:
    """Return the config of an operator by its observers, after torch.ao's `QConfig`, which pt2-bfp uses.

    Args:
        activation: of computed operands: an observer of this module, or what its `with_args` returns; the format is
            its `dtype`, or else `DEFAULT_FORMAT`. None or `nn.Identity` leaves the role in high precision.
        weight: the same of constant operands.

    Returns:
        A `pt2mx.MXQuantizationConfig`.

    Raises:
        MXError: for an unknown format, or an observer of another library.

    Example:
        >>> from pt2mx.pt2e import pt2bfp
        >>> observer = pt2bfp.MinMaxObserver.with_args(dtype="BFP[12|8]{16}(SN)")
        >>> print(pt2bfp.QConfig(activation=observer, weight=pt2bfp.HistogramObserver).activation)
        mxint12{16}
    """
    given = {"activation": activation, "weight": weight}
    observers = {role: observer for role, observer in given.items() if observer not in (None, nn.Identity)}
    formats: dict[str, Any] = {role: _argument(made, "dtype", DEFAULT_FORMAT) for role, made in observers.items()}
    return MXQuantizationConfig(**formats, observer=observers)


_F = TypeVar("_F", bound=Callable)
_GET_QSPEC = """Return the annotation of {tensor} by a config, after `{name}` of torchao's quantizers, which pt2-bfp
    has. An `annotate` of one's own puts it into a `BFPQuantizationAnnotation`.

    Args:
        config: the config of the operator, or None.
        axis: the dimension along which blocks run; by default that of the config's format.

    Returns:
        The spec as torchao's `QuantizationSpec`; None where {tensor} stays in high precision.

    Raises:
        MXError: for another object than a config.

    Example:
        >>> from pt2mx.pt2e import pt2bfp
        >>> spec = pt2bfp.BFPQuantizationSpec("BFP[8|8]{{64}}(SN)")
        >>> config = pt2bfp.BFPQuantizationConfig(spec, spec, spec, spec)
        >>> pt2bfp.{name}(config, axis=-2).qscheme
        ('mx', 'int8', 64, -2, 'floor', 'even', 'identity')
        >>> pt2bfp.{name}(None) is None
        True
    """


def _of(tensor: str) -> Callable[[_F], _F]:
    def documented(function: _F) -> _F:
        function.__doc__ = _GET_QSPEC.format(tensor=tensor, name=function.__name__)
        return function

    return documented


@_of("a computed operand")
def get_input_act_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    return _qspec(config, "activation", axis)


@_of("a result")
def get_output_act_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    return _qspec(config, "output", axis)


@_of("a constant operand")
def get_weight_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    return _qspec(config, "weight", axis)


@_of("a bias")
def get_bias_qspec(config: MXQuantizationConfig | None, axis: int | None = None) -> QuantizationSpec | None:
    return _qspec(config, "bias", axis)


def _argument(constructor: object, name: str, default: object) -> object:
    """Return what `with_args` gave a constructor as an argument."""
    while (made := getattr(constructor, "p", None)) is not None:
        if name in made.keywords:
            return made.keywords[name]
        constructor = made.func
    return default


def _qspec(config: MXQuantizationConfig | None, role: str, axis: int | None) -> QuantizationSpec | None:
    if config is not None and not isinstance(config, MXQuantizationConfig):
        raise MXError(f"expected an MXQuantizationConfig or None, not {config!r}; its roles are {', '.join(ROLES)}")
    spec: MXSpec | None = None if config is None else getattr(config, role)
    if config is None or spec is None:
        return None
    return mx_qspec(spec if axis is None else spec.replace(axis=axis), config.module_of(role), config.ste)
