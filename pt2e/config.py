"""What to quantize the operands of an operator to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from pt2mx.checks import operator_modes
from pt2mx.errors import MXError
from pt2mx.pt2e.observer import MXObserver
from pt2mx.spec import MXSpec, parse

#: the fields of a config that are specs; also the roles that `pt2mx.pt2e.operators` gives to operands
ROLES = ("activation", "weight", "output", "bias")


@dataclass(frozen=True)
class MXQuantizationConfig:
    """The specs of one operator's tensors, each an `MXSpec`, a spelling that `pt2mx.parse` takes, or None (leave in
    high precision). Axes are set by the operators: each runs its blocks along the dimension that it reduces.

    Args:
        activation: computed operands.
        weight: constant operands; `activation=None` with a weight is weight-only quantization.
        output: the result, blocks along its last dimension.
        bias: the bias, where the operator has one.
        is_qat: insert `MXFakeQuantize` instead of `MXObserver` under torchao's own `prepare_qat_pt2e`; the one of pt2mx
            sees to it by itself.
        observer: what to insert for calibration in place of `MXObserver`: a subclass of it, or what `with_args` of one
            returns, such as `MXFormatObserver.with_args(candidates=("mxfp4", "mxfp8"))`. Recipes do not hold it.

    Raises:
        MXError: for an unknown spelling, a spec whose scale is not E8M0, or another observer.
    """

    activation: MXSpec | None = None
    weight: MXSpec | None = None
    output: MXSpec | None = None
    bias: MXSpec | None = None
    is_qat: bool = False
    observer: Callable | None = None

    def __post_init__(self) -> None:
        for role in ROLES:
            value = getattr(self, role)
            if value is not None:
                try:
                    spec = parse(value)
                    operator_modes(spec)  # the graph holds operators, which take some specs only
                    object.__setattr__(self, role, spec)
                except MXError as error:
                    raise MXError(f"{role}: {error}") from None
        if not isinstance(self.is_qat, bool):
            raise MXError(f"is_qat={self.is_qat!r} must be True or False")
        if self.observer is not None and not _makes_observers(self.observer):
            raise MXError(
                f"observer={self.observer!r} must be MXObserver, a subclass of it, or what its with_args(...) returned"
            )


def _makes_observers(constructor: object) -> bool:
    """Tried as torchao will call it, so that a bad argument of `with_args` raises here."""
    if not callable(constructor) or not hasattr(constructor, "with_args"):
        return False
    return isinstance(constructor.with_args(qscheme=("mx", *operator_modes(parse("mxfp8"))))(), MXObserver)


def get_default_mx_quantization_config(
    weight: object = "mxfp8_e4m3",
    activation: object = "mxfp8_e4m3",
    block_size: int | None = None,
    *,
    is_qat: bool = False,
    **modes: object,
) -> MXQuantizationConfig:
    """Weights and activations in one block size and one set of modes.

    Args:
        weight, activation: a format, or None; `activation=None` is weight-only quantization.
        block_size: values that share a scale, in place of what the formats say (32 unless `"mxfp4{16}"` does).
        is_qat: see `MXQuantizationConfig`.
        **modes: `scale_mode` and `rounding`, as `MXSpec` has them.

    Raises:
        MXError: for an unknown format, mode or block size.
    """
    allowed = {f.name for f in fields(MXSpec)} - {"element", "block_size"}
    if unknown := set(modes) - allowed:
        raise MXError(f"unknown argument {sorted(unknown)[0]!r}: allowed beside the formats are {sorted(allowed)}")

    fields_given = modes if block_size is None else {"block_size": block_size, **modes}

    def spec(spelling: object) -> MXSpec | None:
        return None if spelling is None else parse(spelling, **fields_given)

    return MXQuantizationConfig(activation=spec(activation), weight=spec(weight), is_qat=is_qat)
