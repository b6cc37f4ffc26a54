"""The specs of a config of pt2-bfp: block formats with an observer, or affine quantization by torchao."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pt2mx.errors import MXError
from pt2mx.pt2e.pt2bfp.affine import (
    affine_constructor,
    default_fake_quant,
    default_weight_fake_quant,
    unwrapped,
)
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.torchao_pt2e import QuantizationSpec
from pt2mx.spec import MXSpec, parse

#: what pt2-bfp quantizes to where nothing is said
DEFAULT_FORMAT = parse("BFP[8|8]{64}(SN)")
#: dtypes of affine quantization, those of torch.ao's observers among them
_AFFINE = {torch.uint8: torch.uint8, torch.quint8: torch.uint8, torch.int8: torch.int8, torch.qint8: torch.int8}


@dataclass(frozen=True)
class BFPQuantizationSpec:
    """The format of a tensor and the observer that calibration inserts, after pt2-bfp's `BFPQuantizationSpec`.

    Args:
        dtype: as `pt2mx.parse` takes it, kept as an `MXSpec`; `torch.uint8` or `torch.int8` for affine quantization by
            torchao's observers and fake quantizers.
        observer_or_fake_quant_ctr: an observer of this package, or what its `with_args` returns; None for
            `PlaceholderObserver`. For affine quantization torchao's of the same name, or one of torchao's; None for
            `default_fake_quant` of uint8 and `default_weight_fake_quant` of int8.
        qscheme, ch_axis, is_dynamic: those of torch.ao's `QuantizationSpec`, without effect on a block format.

    Raises:
        MXError: for an unknown spelling.

    Example:
        >>> from pt2mx.pt2e import pt2bfp
        >>> spec = pt2bfp.BFPQuantizationSpec("BFP[12|8]{16}(SN)", pt2bfp.HistogramObserver)
        >>> print(spec.dtype)
        mxint12{16}
    """

    dtype: MXSpec | torch.dtype = DEFAULT_FORMAT
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
        affine = _AFFINE.get(self.dtype) if isinstance(self.dtype, torch.dtype) else None
        object.__setattr__(self, "dtype", affine or parse(self.dtype))

    @property
    def affine(self) -> QuantizationSpec | None:
        """torchao's spec of affine quantization; None for a block format."""
        if not isinstance(self.dtype, torch.dtype):
            return None
        defaults = {torch.uint8: default_fake_quant, torch.int8: default_weight_fake_quant}
        constructor = affine_constructor(self.observer_or_fake_quant_ctr or defaults[self.dtype])
        given, info = unwrapped(constructor)[1], torch.iinfo(self.dtype)
        ch_axis = given.get("ch_axis") if self.ch_axis is None else self.ch_axis
        whole = torch.per_tensor_affine if given.get("ch_axis") is None else torch.per_channel_affine
        return QuantizationSpec(
            dtype=self.dtype,
            observer_or_fake_quant_ctr=constructor,
            quant_min=given.get("quant_min", info.min),
            quant_max=given.get("quant_max", info.max),
            qscheme=self.qscheme or given.get("qscheme", whole),
            ch_axis=ch_axis,
            is_dynamic=self.is_dynamic,
        )


@dataclass(frozen=True)
class BFPConfig(MXQuantizationConfig):
    """An `MXQuantizationConfig` some of whose roles may have affine quantization: `BFPQuantizationConfig` and `QConfig`
    return one.

    Args:
        affine: (role, torchao's spec) pairs; these roles have no MX spec.
    """

    affine: tuple[tuple[str, QuantizationSpec], ...] = ()

    if TYPE_CHECKING:

        def __init__(self, *, affine: tuple[tuple[str, QuantizationSpec], ...] = (), **fields: Any) -> None: ...

    def to_dict(self) -> dict[str, object]:
        """Return the fields that are not at their defaults, affine roles by their dtype.

        Returns:
            A dictionary as of `MXQuantizationConfig.to_dict`; one with affine roles makes no config again.
        """
        return super().to_dict() | {role: str(spec.dtype) for role, spec in self.affine}


def config_of(specs: dict[str, BFPQuantizationSpec | None], is_qat: bool = False) -> BFPConfig:
    """Return the config of the roles' specs."""
    given = {role: spec for role, spec in specs.items() if spec is not None}
    for role, spec in given.items():
        if not isinstance(spec, BFPQuantizationSpec):
            raise MXError(f"{role}: expected a BFPQuantizationSpec or None, not {spec!r}")
    affine = tuple((role, spec.affine) for role, spec in given.items() if spec.affine is not None)
    blocked = {role: spec for role, spec in given.items() if spec.affine is None}
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
    specs = {"activation": input_activation, "output": output_activation, "weight": weight, "bias": bias}
    return config_of(specs, is_qat)


def QConfig(activation: object, weight: object) -> MXQuantizationConfig:
    """Return the config of an operator by its observers, after torch.ao's `QConfig`, which pt2-bfp uses.

    Args:
        activation: of computed operands: an observer of this package, or what its `with_args` returns; the format is
            its `dtype`, or else `DEFAULT_FORMAT`. One of torchao's for affine quantization, with a `dtype` of 8 bits.
            None or `nn.Identity` leaves the role in high precision.
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
    given: dict[str, Any] = {"activation": activation, "weight": weight}
    return config_of(
        {
            role: BFPQuantizationSpec(unwrapped(made)[1].get("dtype", DEFAULT_FORMAT), made)
            for role, made in given.items()
            if made not in (None, nn.Identity)
        }
    )
