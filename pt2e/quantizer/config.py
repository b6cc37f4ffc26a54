"""`MXQuantizationConfig`: the specs of one operator's operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pt2mx.accumulator import Accumulator, parse_accumulator
from pt2mx.errors import MXError, check_integer, nearest
from pt2mx.ops.checks import check_ste
from pt2mx.pt2e.observe.fake_quantize import MXFakeQuantize
from pt2mx.pt2e.observe.observer import MXObserver
from pt2mx.pt2e.observe.qspec import mx_qscheme
from pt2mx.pt2e.observe.tensor_scales import check_tensor_scale
from pt2mx.pt2e.quantizer.operators import OPERAND_NAMES
from pt2mx.spec import MXSpec, parse

#: the fields of a config that are specs, and the roles of operands in `pt2mx.pt2e.quantizer.operators`
ROLES = ("activation", "weight", "output", "bias")
#: all fields of a config that are specs
SPECS = (*ROLES, "gradient")

#: the choices for the blocks of an attention's values, the field `value_blocks` of a config
VALUE_BLOCKS = ("head_dim", "key_length")

#: most values that are rotated together
LARGEST_ROTATION = 1024

#: the constructor of calibration modules, or (role, constructor) pairs
Observer = Callable | tuple[tuple[str, Callable], ...] | None


@dataclass(frozen=True)
class MXQuantizationConfig:
    """The specs of one operator's tensors.

    Each is an `MXSpec`, a spelling that `pt2mx.parse` takes, or None (leave in high precision). Operators set the axes:
    blocks run along the dimension that the operator reduces.

    Args:
        activation: computed operands.
        weight: constant operands; `activation=None` with a weight is weight-only quantization.
        output: the result, blocks along its last dimension.
        bias: the bias, where the operator has one.
        operands: specs (or None) of single operands by name, which override the specs of their roles, such as
            `{"query": "mxfp8", "value": None}`. The README of this folder lists the operands of each operator; other
            operators ignore the name. Stored as pairs.
        ste: the gradient in quantization-aware training: "identity" (unchanged) or "clipped" (zero where the value
            saturated).
        is_qat: insert `MXFakeQuantize` instead of `MXObserver` under torchao's own `prepare_qat_pt2e`; pt2mx's function
            always does so.
        observer: the module to insert for calibration instead of `MXObserver`: a subclass, or the result of its
            `with_args`, such as `MXFormatObserver.with_args(candidates=("mxfp4", "mxfp8"))`. Or a mapping from roles to
            these, `{"activation": ..., "weight": ...}`, stored as pairs. Recipes cannot store it.
        value_blocks: the dimension of the blocks of an attention's values. "head_dim" keeps tokens independent of each
            other. "key_length" is the dimension that the matmul reduces, as in the specification's dot product (OCP MX
            v1.0, section 6.1); there masked, padded and later tokens influence the scale of a block.
        tensor_scale: the scale of a whole activation, of formats that have one (`"nvfp4"`). "static" is a number that
            calibration finds from the maximum over its batches, "moving_average" from the moving average of their
            maxima; conversion stores it as a buffer. "dynamic" is the scale of each tensor that comes in. The scale of
            a weight follows from its values, and is computed once. compressed-tensors writes "static" as `dynamic:
            local`.
        gradient: in training (`prepare_qat_pt2e`), the gradient that flows back into a quantized operator. Each product
            of the backward pass quantizes it along the dimension that the product reduces, and so the other operand, in
            its own format. The rounding may be stochastic: "mxfp8_e5m2(stochastic)".
        gradient_hadamard: values of both factors of such a product that a Hadamard matrix rotates together before they
            are quantized, a power of two; 1 for none.
        accumulator: the register in which the products of matmuls, convolutions and attention are added, and the order
            of the sums, in a spelling of `pt2mx.parse_accumulator` ("bfloat16{32}", "fixed(8,16)", "hopper"). None or
            "float32": torch's own sums.

    Raises:
        MXError: for an unknown spelling or operand, an E8M0 scale of another width, or another observer; for a gradient
            without quantized operands.

    Example:
        >>> import pt2mx
        >>> config = pt2mx.MXQuantizationConfig(weight="mxfp4", activation="mxfp8", operands={"value": "mxint8{16}"})
        >>> config.to_dict()
        {'activation': 'mxfp8_e4m3{32}', 'weight': 'mxfp4_e2m1{32}', 'operands': {'value': 'mxint8{16}'}}
    """

    activation: MXSpec | None = None
    weight: MXSpec | None = None
    output: MXSpec | None = None
    bias: MXSpec | None = None
    operands: tuple[tuple[str, MXSpec | None], ...] = ()
    ste: str = "identity"
    is_qat: bool = False
    observer: Observer = None
    value_blocks: str = "head_dim"
    tensor_scale: str = "static"
    gradient: MXSpec | None = None
    gradient_hadamard: int = 1
    accumulator: Accumulator | None = None

    if TYPE_CHECKING:  # `__post_init__` converts the arguments to the types of the fields

        def __init__(
            self,
            activation: object = None,
            weight: object = None,
            output: object = None,
            bias: object = None,
            operands: object = (),
            ste: str = "identity",
            is_qat: bool = False,
            observer: object = None,
            value_blocks: str = "head_dim",
            tensor_scale: str = "static",
            gradient: object = None,
            gradient_hadamard: int = 1,
            accumulator: object = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in SPECS:
            object.__setattr__(self, name, checked_spec(name, getattr(self, name)))
        object.__setattr__(self, "operands", _checked_operands(self.operands))
        check_ste(self.ste)
        if not isinstance(self.is_qat, bool):
            raise MXError(f"is_qat={self.is_qat!r} must be True or False")
        if self.value_blocks not in VALUE_BLOCKS:
            raise MXError(f"unknown value_blocks {self.value_blocks!r}: {nearest(self.value_blocks, VALUE_BLOCKS)}")
        check_tensor_scale(self.tensor_scale)
        object.__setattr__(self, "accumulator", parse_accumulator(self.accumulator))
        object.__setattr__(self, "observer", _checked_observer(self.observer))
        self._check_gradient()

    def _check_gradient(self) -> None:
        size = self.gradient_hadamard
        check_integer("gradient_hadamard", size, 1, LARGEST_ROTATION)
        if size & (size - 1):
            raise MXError(f"gradient_hadamard={size} must be a power of two, such as 32, or 1 for none")
        if size > 1 and self.gradient is None:
            raise MXError(f"gradient_hadamard={size} needs a gradient: pass gradient='mxfp8_e5m2' or another format")
        specs = (self.activation, self.weight, *dict(self.operands).values())
        if self.gradient is not None and not any(specs):
            raise MXError(f"gradient={str(self.gradient)!r} is of quantized operators: pass a weight or an activation")
        if self.gradient is not None and self.accumulator is not None:
            raise MXError(
                f"gradient={str(self.gradient)!r} and accumulator={str(self.accumulator)!r}: the gradient of an "
                "accumulated operator is that of torch's matmul; pass one of the two"
            )

    def spec_of(self, operand: str, role: str) -> MXSpec | None:
        """Return the spec of an operand.

        Args:
            operand: its name, as in `operands`.
            role: "activation", "weight", "output" or "bias".

        Returns:
            The spec by name, else the one by role; None: high precision.
        """
        return dict(self.operands).get(operand, getattr(self, role))

    def module_of(self, role: str) -> Callable:
        """Return the constructor of the module to insert for a tensor.

        Args:
            role: a role, as in `spec_of`.

        Returns:
            `MXFakeQuantize` with `is_qat`, else the `observer` of the role, `MXObserver` by default.
        """
        if self.is_qat:
            return MXFakeQuantize
        chosen = dict(self.observer).get(role) if isinstance(self.observer, tuple) else self.observer
        return chosen or MXObserver

    def to_dict(self) -> dict[str, object]:
        """Return the fields that are not at their defaults.

        Returns:
            Specs as `pt2mx.parse` spells them, and plain values; `observer` is not converted.
        """
        specs = {name: getattr(self, name) for name in SPECS}
        plain: dict[str, object] = {name: str(spec) for name, spec in specs.items() if spec is not None}
        if self.operands:
            plain["operands"] = {name: None if spec is None else str(spec) for name, spec in self.operands}
        if self.observer is not None:
            plain["observer"] = dict(self.observer) if isinstance(self.observer, tuple) else self.observer
        names = ("ste", "is_qat", "value_blocks", "tensor_scale", "gradient_hadamard")
        switches = {name: getattr(self, name) for name in names}
        plain |= {name: value for name, value in switches.items() if value != _DEFAULTS[name]}
        return plain if self.accumulator is None else {**plain, "accumulator": str(self.accumulator)}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> MXQuantizationConfig:
        """Make a config from a dictionary such as `to_dict` returns.

        Args:
            values: field -> value, as the class takes them.

        Returns:
            The config.

        Raises:
            MXError: for an unknown key or value.
        """
        if not isinstance(values, Mapping):
            raise MXError(f"expected a dictionary of {', '.join(_DEFAULTS)}, not {values!r}")
        for name in values:
            if name not in _DEFAULTS:
                raise MXError(f"unknown key {name!r} of a config: {nearest(name, _DEFAULTS)}")
        arguments: dict[str, Any] = dict(values)
        return cls(**arguments)


#: what a setting gives an operator; None leaves it in high precision
Config = MXQuantizationConfig | None

_DEFAULTS = {field.name: field.default for field in fields(MXQuantizationConfig)}


def _checked_observer(observer: object) -> Observer:
    """Return a checked `observer`, a mapping as pairs."""
    if not isinstance(observer, Mapping | tuple):
        return None if observer is None else _checked_constructor(observer)
    by_role = _mapping(observer, "observer must be one, or map roles to observers", "role {} of an observer", ROLES)
    return tuple((role, _checked_constructor(by_role[role])) for role in ROLES if role in by_role)


def _mapping(pairs: Any, wanted: str, kind: str, names: Sequence[str]) -> dict[str, Any]:
    try:
        named = dict(pairs)
    except (TypeError, ValueError):
        raise MXError(f"{wanted}, not {pairs!r}") from None
    for name in named:
        if name not in names:
            raise MXError(f"unknown {kind.format(repr(name))}: {nearest(name, names)}")
    return named


def _checked_constructor(observer: object) -> Callable:
    if not callable(observer) or not _makes_observers(observer):
        raise MXError(
            f"observer={observer!r} must be MXObserver, a subclass of it, or what its with_args(...) returned"
        )
    return observer


def _makes_observers(constructor: Callable) -> bool:
    """Call it as torchao will, so that a bad argument of `with_args` raises here."""
    if not hasattr(constructor, "with_args"):
        return False
    return isinstance(constructor.with_args(qscheme=mx_qscheme(parse("mxfp8")))(), MXObserver)


def checked_config(config: object) -> Config:
    """Return `config`, checked.

    Raises:
        MXError: for another object.
    """
    if config is not None and not isinstance(config, MXQuantizationConfig):
        raise MXError(
            f"expected an MXQuantizationConfig or None, not {config!r}: make one with "
            "get_default_mx_quantization_config(...)"
        )
    return config


def checked_spec(name: str, value: object) -> MXSpec | None:
    """Return the spec that `value` is or spells; None for None.

    Raises:
        MXError: for a value that is no spec, or a spec that operators of a graph do not take.
    """
    if value is None:
        return None
    try:
        spec = parse(value)
        spec.check_operators()
    except MXError as error:
        raise MXError(f"{name}: {error}") from None
    return spec


def _checked_operands(operands: Any) -> tuple[tuple[str, MXSpec | None], ...]:
    wanted = "operands must map names to specs, such as {'value': 'mxfp8'}"
    named = _mapping(operands, wanted, "operand {}", OPERAND_NAMES)
    return tuple((name, checked_spec(f"operand {name!r}", spec)) for name, spec in sorted(named.items()))


def get_default_mx_quantization_config(
    weight: object = "mxfp8_e4m3",
    activation: object = "mxfp8_e4m3",
    block_size: int | None = None,
    *,
    operands: object = (),
    ste: str = "identity",
    is_qat: bool = False,
    observer: object = None,
    value_blocks: str = "head_dim",
    tensor_scale: str = "static",
    gradient: object = None,
    gradient_hadamard: int = 1,
    accumulator: object = None,
    **modes: object,
) -> MXQuantizationConfig:
    """Make a config for weights and activations (and gradients) with one block size and the same modes.

    Args:
        weight, activation: a format, or None; `activation=None` is weight-only quantization.
        gradient: a format, or None; see `MXQuantizationConfig`.
        block_size: values that share a scale; None: the block size of the formats, 32 unless they name one
            (`"mxfp4{16}"`).
        operands, ste, is_qat, observer, value_blocks, tensor_scale, gradient_hadamard, accumulator: see
            `MXQuantizationConfig`.
        modes: `scale_mode` and `rounding`, as `MXSpec` has them.

    Returns:
        The config, for a setter of `MXQuantizer`.

    Raises:
        MXError: for an unknown format, mode or block size.

    Example:
        >>> import pt2mx
        >>> pt2mx.get_default_mx_quantization_config(weight="mxfp4", block_size=16).to_dict()
        {'activation': 'mxfp8_e4m3{16}', 'weight': 'mxfp4_e2m1{16}'}
    """
    allowed = {f.name for f in fields(MXSpec)} - {"element", "block_size"}
    if unknown := set(modes) - allowed:
        raise MXError(f"unknown argument {sorted(unknown)[0]!r}: allowed apart from the formats are {sorted(allowed)}")

    spec_fields = modes if block_size is None else {"block_size": block_size, **modes}

    def spec(spelling: object) -> MXSpec | None:
        return None if spelling is None else parse(spelling, **spec_fields)

    return MXQuantizationConfig(
        activation=spec(activation),
        weight=spec(weight),
        operands=operands,
        ste=ste,
        is_qat=is_qat,
        observer=observer,
        value_blocks=value_blocks,
        tensor_scale=tensor_scale,
        gradient=spec(gradient),
        gradient_hadamard=gradient_hadamard,
        accumulator=accumulator,
    )
