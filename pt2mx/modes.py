"""The modes of quantization as data: how a block's scale follows from its values, and how values are rounded.

Every kernel reads these tables, or is tested against the reference kernel, which does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2mx.errors import MXError, nearest
from pt2mx.formats import ElementFormat
from pt2mx.scale_formats import ScaleFormat, is_scale_format

_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_WIDTHS = re.compile(r"e\d+m\d+", re.ASCII)
#: (blocks: (..., block) fp32, the element) -> the scale of each block, (...) float
ScaleFunction = Callable[[Tensor, ElementFormat], Tensor]
_FP32_MANTISSA = (1 << 23) - 1


@dataclass(frozen=True)
class ScaleMode:
    """The rule by which a block's shared exponent follows from its amax.

    It is `floor(log2 amax) - emax`, plus one where the fp32 mantissa field of amax is above `threshold(element)` (-1:
    always), and then the one of its `exponent_offsets` (what is added to it) with the least sum of squared errors over
    the block; of equal ones the first. `elements` names the elements for which the rule is defined; None: every
    element. `function` of a registered mode gives the scale in their place (`register_scale_mode`).
    """

    threshold: Callable[[ElementFormat], int]
    exponent_offsets: tuple[int, ...] = (0,)
    elements: tuple[str, ...] | None = None
    function: ScaleFunction | None = None

    @property
    def searches(self) -> bool:
        """True if the errors decide, False if the amax alone does."""
        return self.exponent_offsets != (0,)

    def is_defined_for(self, element: ElementFormat) -> bool:
        """Return whether the rule is defined for an element."""
        return self.elements is None or element.name in self.elements


def _never(element: ElementFormat) -> int:
    return _FP32_MANTISSA


def _always(element: ElementFormat) -> int:
    return -1


def _mantissa(value: float, element: ElementFormat) -> int:
    """The fp32 mantissa field of a value in the element's largest binade."""
    return round((value / 2.0**element.emax - 1) * 2**23)


#: of scales that are powers of two
SCALE_MODES: dict[str, ScaleMode] = {
    # OCP section 6.3: never rounded up
    "floor": ScaleMode(_never),
    # up unless amax is a power of two
    "ceil": ScaleMode(lambda element: 0),
    # up where amax / max_normal is above a power of two, so that nothing saturates: Mishra et al., "Recipes for
    # Pre-training LLMs with MXFP8" (arXiv:2506.08027), and cuBLAS, "1D Block Quantization"
    "rceil": ScaleMode(lambda element: _mantissa(element.max_normal, element)),
    # up where amax / 7.25 is above a power of two: Yu et al., "MXAttention" (arXiv:2607.24377), and AutoRound's
    # "mx_fp4_rceil_v2"; both for FP4 alone
    "rceil_v2": ScaleMode(lambda element: _mantissa(7.25, element), elements=("fp4_e2m1",)),
    # up where amax plus half a unit in the last place of the element reaches the next power of two: "even" of torchao's
    # `ScaleCalculationMode` and of Quark
    "even": ScaleMode(lambda element: _FP32_MANTISSA - (1 << 22 >> element.mantissa_bits)),
    # twice floor's scale, so that nothing saturates: `nki.isa.quantize_mx` of AWS Trainium3
    "doubled": ScaleMode(_always),
    # of floor and its two neighbours the one that loses least
    "mse": ScaleMode(_never, exponent_offsets=(0, -1, 1)),
}


@dataclass(frozen=True)
class FloatScaleMode:
    """The rule by which a block's scale follows from its amax, for scale formats with a significand.

    A scale is amax over the largest value of the element, rounded to the scale format, to nearest, ties to even. With a
    tensor scale the quotient is also over it, so that the largest block of the tensor has the scale `tensor_room`.
    Before rounding, a quotient of at most `zero_below` becomes `zero`, and the result is clamped to `least` and the
    largest scale.

    Args:
        least: the smallest quotient that is rounded.
        zero_below, zero: the largest quotient that counts as zero, negative for none; and the quotient in its place.
        tensor_room: the scale of the tensor's largest block, from which the tensor scale follows.
        reciprocal: True multiplies values by a reciprocal; False divides them by the scale.
        rounds_up: True takes the next scale where the rounded one is smaller than the quotient.
        factors, code_offsets: the candidates of a search, as multiples of the quotient and as offsets to the code of
            the rounded scale; the one with the smallest squared error over the block is taken, of equal ones the first.
        function: of a registered mode, gives the scale in place of the quotient (`register_scale_mode`).
    """

    least: Callable[[ScaleFormat], float] = lambda scale: scale.min_value
    zero_below: Callable[[ScaleFormat], float] = lambda scale: 0.0
    zero: Callable[[ScaleFormat], float] = lambda scale: 1.0
    tensor_room: Callable[[ScaleFormat], float] = lambda scale: scale.max_value
    reciprocal: bool = False
    rounds_up: bool = False
    factors: Callable[[ElementFormat], tuple[float, ...]] = lambda element: (1.0,)
    code_offsets: tuple[int, ...] = (0,)
    function: ScaleFunction | None = None


FLOAT_SCALE_MODES: dict[str, FloatScaleMode] = {
    # ModelOpt's NVFP4
    "nearest": FloatScaleMode(),
    # torchao's NVFP4: the smallest scale is a normal number, and values are multiplied by a reciprocal
    "nearest_reciprocal": FloatScaleMode(
        zero_below=lambda scale: -1.0, least=lambda scale: 2.0**scale.grid.emin, reciprocal=True
    ),
    # compressed-tensors: a scale that rounds to zero becomes the epsilon of its format, so that its values become zero
    "nearest_flush": FloatScaleMode(
        zero_below=lambda scale: scale.min_value / 2, zero=lambda scale: 2.0**-scale.grid.mantissa_bits
    ),
    # the smallest scale at which no value saturates
    "rceil": FloatScaleMode(rounds_up=True),
    # the block's largest value on the element's largest value, or on its largest power of two (FP4: 6 or 4). Cook et
    # al., "Four Over Six" (arXiv:2512.02010): the tensor scale leaves room for the second (E4M3: 256, not 448)
    "four_six": FloatScaleMode(
        tensor_room=lambda scale: 2.0**scale.grid.emax,
        factors=lambda element: (1.0, element.max_normal / 2.0**element.emax),
    ),
    # of the nearest scale and its two neighbours the one that loses least
    "mse": FloatScaleMode(code_offsets=(0, -1, 1)),
}


def scale_modes(
    scale_format: ScaleFormat, element: ElementFormat | None = None
) -> Mapping[str, ScaleMode | FloatScaleMode]:
    """Return the scale modes of a scale format, by name; with an element, those that are defined for it."""
    modes = SCALE_MODES if scale_format.is_power_of_two else FLOAT_SCALE_MODES
    if element is None or not scale_format.is_power_of_two:
        return modes
    return {name: mode for name, mode in SCALE_MODES.items() if mode.is_defined_for(element)}


def check_scale_mode(name: object, scale_format: ScaleFormat, element: ElementFormat) -> None:
    """Raise an `MXError` unless scales of this format and element have a scale mode of that name."""
    is_power_of_two = scale_format.is_power_of_two
    modes = SCALE_MODES if is_power_of_two else FLOAT_SCALE_MODES
    if not isinstance(name, str) or name not in modes:
        scales = "" if is_power_of_two else f" of {scale_format} scales"
        raise MXError(
            f"unknown scale_mode {name!r}{scales}: {nearest(name, modes)}; register one of your own before it is named "
            "(pt2mx.register_scale_mode)"
        )
    if is_power_of_two and not SCALE_MODES[name].is_defined_for(element):
        defined = scale_modes(scale_format, element)
        raise MXError(f"scale_mode {name!r} is not defined for {element}: use one of {', '.join(defined)} for it")


def register_scale_mode(name: str, function: ScaleFunction) -> None:
    """Add a scale mode, for this process, to the modes of every scale format.

    Only the reference kernel computes it, also in compiled programs. A process that loads what names it registers it
    first.

    Args:
        name: lower-case letters, digits and `_`; no name of another mode, of a rounding or of a scale format.
        function: takes blocks (..., block_size) float32, the last of a row filled with zeros, and the element. It
            returns the scale of each block, (...) float, at least 0. E8M0 takes the power of two at or below it; other
            scale formats round it to nearest, with a tensor scale in units of that. A block for which it is negative,
            Inf or NaN becomes NaN, as a block with an Inf or a NaN does. It must treat every block alike and alone,
            since large tensors are quantized in slices.

    Raises:
        MXError: for a name that is taken, and another function under a name that is registered.

    Example:
        >>> import torch, pt2mx
        >>> def of_mean(blocks, element):
        ...     return blocks.abs().mean(-1) * 2 / element.max_normal
        >>> pt2mx.register_scale_mode("of_mean", of_mean)
        >>> pt2mx.fake_quantize_mx(torch.tensor([1.0, 2.0, 3.0, 50.0]), "int4{4}(of_mean,f32)")
        tensor([ 0.,  0.,  4., 28.])
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MXError(f"name={name!r} must be lower-case letters, digits and '_', and begin with a letter")
    if not callable(function):
        raise MXError(f"function={function!r} must be a function of blocks and an element")
    known = SCALE_MODES.get(name) or FLOAT_SCALE_MODES.get(name)
    taken = known is not None and known.function is None
    if taken or name in ROUNDINGS or is_scale_format(name) or name == "row" or _WIDTHS.fullmatch(name):
        raise MXError(f"name={name!r} is a mode, a rounding or a scale format of pt2mx: take another")
    if known is not None and not _is_same(known.function, function):
        raise MXError(f"scale_mode {name!r} is registered with another function, {known.function!r}: take another name")
    SCALE_MODES.setdefault(name, ScaleMode(_never, function=function))
    FLOAT_SCALE_MODES.setdefault(name, FloatScaleMode(function=function))


def _is_same(known: Any, function: Any) -> bool:
    """Return whether two functions are one, or one that a file without closures or defaults defined twice."""
    if known is function:
        return True
    reads_more = any(getattr(f, "__closure__", None) or getattr(f, "__defaults__", None) for f in (known, function))
    return not reads_more and getattr(known, "__code__", known) == getattr(function, "__code__", function)


@dataclass(frozen=True)
class Rounding:
    """The rule by which a value, given in units of its quantum, becomes a whole number of quanta; zero keeps its sign.

    `to_quanta` takes (units fp32, random int32 in [0, 2**31) or None) and is exact. A `directed` rounding takes any
    value but zero, however small, to its neighbour on one side. One that is `random` needs a seed.
    """

    to_quanta: Callable[[Tensor, Tensor | None], Tensor]
    directed: bool = False
    random: bool = False


def _beyond(units: Tensor) -> Tensor:
    """Return the part of a magnitude beyond the whole number below it."""
    return (units - units.trunc()).abs()


def _away_from_zero(units: Tensor, where: Tensor) -> Tensor:
    """Return the neighbour away from zero, elsewhere the one toward zero."""
    away = torch.where(units < 0, -1.0, torch.ones_like(units))  # of two numbers the result has torch's default dtype
    return torch.where(where, units.trunc() + away, units.trunc())


def _stochastic(units: Tensor, random: Tensor | None) -> Tensor:
    """Return the neighbour away from zero in proportion to the distance, to within 2**-31: the mean is the value.

    Source: Croci et al., "Stochastic rounding: implementation, error analysis and applications" (2022).
    """
    if random is None:
        raise TypeError("stochastic rounding takes a random number for each value")
    return _away_from_zero(units, random < (_beyond(units) * 2.0**31).to(torch.int32))


ROUNDINGS: dict[str, Rounding] = {
    # to nearest, ties to an even number of quanta (IEEE 754 roundTiesToEven)
    "even": Rounding(lambda units, random: units.round()),
    # to nearest, ties away from zero; floor(x + 0.5) would round 0.49999997 up
    "half_away": Rounding(lambda units, random: _away_from_zero(units, _beyond(units) >= 0.5)),
    # to nearest, ties toward zero
    "half_toward_zero": Rounding(lambda units, random: _away_from_zero(units, _beyond(units) > 0.5)),
    # to nearest, ties toward positive infinity
    "half_up": Rounding(
        lambda units, random: _away_from_zero(units, (_beyond(units) > 0.5) | (_beyond(units) == 0.5) & (units > 0))
    ),
    "toward_zero": Rounding(lambda units, random: units.trunc()),
    # toward positive infinity
    "up": Rounding(lambda units, random: units.ceil(), directed=True),
    # toward negative infinity
    "down": Rounding(lambda units, random: units.floor(), directed=True),
    "stochastic": Rounding(_stochastic, random=True),
}
