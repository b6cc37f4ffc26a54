"""The annotations that a quantizer of one's own makes of a config, after torchao's quantizers, which pt2-bfp has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pt2mx.errors import MXError
from pt2mx.pt2e.pt2bfp.specs import BFPConfig
from pt2mx.pt2e.qspec import mx_qspec
from pt2mx.pt2e.quantizer.config import ROLES, MXQuantizationConfig
from pt2mx.pt2e.torchao_pt2e import QuantizationSpec
from pt2mx.spec import MXSpec

_F = TypeVar("_F", bound=Callable)
_DOCSTRING = """Return the annotation of {tensor} by a config, after `{name}` of torchao's quantizers, which pt2-bfp
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
        function.__doc__ = _DOCSTRING.format(tensor=tensor, name=function.__name__)
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


def _qspec(config: MXQuantizationConfig | None, role: str, axis: int | None) -> QuantizationSpec | None:
    if config is not None and not isinstance(config, MXQuantizationConfig):
        raise MXError(f"expected an MXQuantizationConfig or None, not {config!r}; its roles are {', '.join(ROLES)}")
    if isinstance(config, BFPConfig) and role in dict(config.affine):
        return dict(config.affine)[role]
    spec: MXSpec | None = None if config is None else getattr(config, role)
    if config is None or spec is None:
        return None
    return mx_qspec(spec if axis is None else spec.replace(axis=axis), config.module_of(role), config.ste)
