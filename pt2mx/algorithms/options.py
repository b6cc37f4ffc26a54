"""The algorithms of `pt2mx.optimize` with their options, and presets of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pt2mx.errors import MXError, nearest


class Algorithm:
    """The base of the classes in `ALGORITHMS`."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            kind, least, most = RANGES[field.name]
            right = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
            if not right or not least <= value <= most:  # NaN is in no range
                name = type(self).__name__
                allowed = "True or False" if kind is bool else f"a number from {least} to {most}"
                hint = "; YAML takes 1e-2 for text: write 0.01" if isinstance(value, str) else ""
                raise MXError(f"{name}({field.name}={value!r}): {field.name} must be {allowed}{hint}")


@dataclass(frozen=True)
class Smoothing(Algorithm):
    """Divide the channels of an input by powers of two, and multiply the weight's columns by them.

    Source: SmoothQuant (Xiao et al., arXiv:2211.10438); with `weight_only` AWQ (Lin et al., arXiv:2306.00978).

    Args:
        strength: 1 makes all channels of the input equally large; 0 does so for the columns of the weight.
        weight_only: True also smooths inputs that stay in high precision.

    Raises:
        MXError: for an option out of its range.

    Example:
        >>> from pt2mx.algorithms import Smoothing
        >>> Smoothing(strength=0.6)
        Smoothing(strength=0.6, weight_only=False)
    """

    strength: float = 0.5
    weight_only: bool = False


@dataclass(frozen=True)
class Rotation(Algorithm):
    """Rotate inputs and weights of matmuls within blocks by a Hadamard matrix.

    With `online` the graph rotates each input at run time. Without, the weights of a decoder alone change, so that
    checkpoints hold it: those that write or read the residual stream, after the gains of RMS norms are folded into the
    linear layers that read them, and those that write or read the values of attention, within each head. An embedding
    and a head that were tied become two weights. Attention whose values are gated keeps them.

    Sources: QuaRot (Ashkboos et al., arXiv:2404.00456); without `online` R1 and R2 of SpinQuant (Liu et al.,
    arXiv:2405.16406), with a Hadamard matrix that is not trained.

    Args:
        size: the most values that are rotated together; for other lengths the largest power of two that divides them.
            None: 32 with `online`, else any number. With `online`, formats whose scales have a significand are rotated
            within their blocks (NVFP4: 16).
        attention: True also rotates queries and keys, if both are quantized.
        online: False folds rotations into the weights of a decoder with RMS norms.
        strict: without `online`, False leaves a model as it is, with a warning, whose weights cannot hold rotations.

    Raises:
        MXError: for a size that is no power of two, and for queries and keys without `online`.

    Example:
        >>> from pt2mx.algorithms import Rotation
        >>> Rotation(online=False)
        Rotation(size=None, attention=False, online=False, strict=True)
    """

    size: int | None = None
    attention: bool = False
    online: bool = True
    strict: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None and self.size & (self.size - 1):
            raise MXError(f"Rotation(size={self.size}): size must be a power of two")
        if self.attention and not self.online:
            raise MXError(
                "Rotation(attention=True, online=False): weights hold no rotation of queries and keys, which are "
                "turned by their positions: leave attention or online out"
            )


@dataclass(frozen=True)
class ScaleSearch(Algorithm):
    """Scales of blocks of least squared error, for the weights that GPTQ does not round.

    Args:
        by_inputs: True weights the error of each column by the mean square of its input, as llama.cpp does with its
            importance matrix. This is the error of the matmul if the columns of the input are independent.

    Raises:
        MXError: for an option out of its range.

    Example:
        >>> from pt2mx.algorithms import ScaleSearch
        >>> ScaleSearch()
        ScaleSearch(by_inputs=False)
    """

    by_inputs: bool = False


@dataclass(frozen=True)
class GPTQ(Algorithm):
    """Columns rounded one after the other, each error made up for by the columns to come. Source: Frantar et al.,
    arXiv:2210.17323.

    Args:
        damping: added to the diagonal of the Hessian, times its mean.
        damping_of_few: added to `damping`, times columns over rows of the calibration: of few inputs it would learn the
            noise.
        act_order: True takes the columns by falling energy of their input.
        correction: the share that a weight makes up for of the errors of the layers before it, which are then rounded
            first (GPTAQ, Li et al., arXiv:2504.02692). All batches run through the graph together. None: each weight is
            rounded for the inputs that it has in float.

    Raises:
        MXError: for an option out of its range.

    Example:
        >>> from pt2mx.algorithms import GPTQ
        >>> GPTQ(damping=0.1)
        GPTQ(damping=0.1, damping_of_few=0.5, act_order=True, correction=None)
    """

    damping: float = 0.01
    damping_of_few: float = 0.5
    act_order: bool = True
    correction: float | None = None


@dataclass(frozen=True)
class LearnedRounding(Algorithm):
    """Weights of a repeated block trained by the signs of gradients, until its outputs come nearest to the float
    block's. Source: Cheng et al., arXiv:2309.05516 (AutoRound).

    Args:
        steps: of each block.
        seed: of the order of the batches.

    Raises:
        MXError: for an option out of its range.

    Example:
        >>> from pt2mx.algorithms import LearnedRounding
        >>> LearnedRounding(steps=50)
        LearnedRounding(steps=50, seed=0)
    """

    steps: int = 110
    seed: int = 0


#: name in recipes -> algorithm, in the order in which they are applied
ALGORITHMS: dict[str, type[Algorithm]] = {
    "smoothing": Smoothing,
    "rotation": Rotation,
    "scale_search": ScaleSearch,
    "gptq": GPTQ,
    "learned_rounding": LearnedRounding,
}

#: option -> its type, least and largest value
RANGES: dict[str, tuple[Any, float, float]] = {
    "strength": ((int, float), 0, 1),
    "weight_only": (bool, 0, 1),
    "size": (int, 4, 1024),
    "attention": (bool, 0, 1),
    "online": (bool, 0, 1),
    "strict": (bool, 0, 1),
    "by_inputs": (bool, 0, 1),
    "damping": ((int, float), 0, 1e6),
    "damping_of_few": ((int, float), 0, 1e6),
    "act_order": (bool, 0, 1),
    "correction": ((int, float), 0, 1),
    "steps": (int, 1, 100_000),
    "seed": (int, 0, 2**63 - 1),
}


PRESETS: dict[str, tuple[Algorithm, ...]] = {
    "fast": (ScaleSearch(),),
    "imatrix": (ScaleSearch(by_inputs=True),),
    "balanced": (Rotation(), ScaleSearch(), GPTQ()),
    "best": (Smoothing(), Rotation(attention=True), ScaleSearch(), GPTQ(), LearnedRounding()),
}


def chosen_algorithms(choice: object) -> tuple[Algorithm, ...]:
    """The algorithms that a choice means, in the order in which they are applied.

    Args:
        choice: the name of a preset, algorithms in any order, or a mapping from their names to their options.

    Raises:
        MXError: for an unknown name or option, an algorithm given twice, and none.
    """
    if isinstance(choice, str):
        if choice not in PRESETS:
            raise MXError(f"unknown preset {choice!r}: {nearest(choice, list(PRESETS))}")
        return PRESETS[choice]
    if isinstance(choice, Mapping):
        passed: list[object] = [_made(name, options) for name, options in choice.items()]
    else:
        passed = list(choice) if isinstance(choice, Iterable) else [choice]
    by_kind = {type(one): one for one in passed if isinstance(one, Algorithm)}
    if not all(type(one) in ALGORITHMS.values() for one in passed):
        names = ", ".join(kind.__name__ for kind in ALGORITHMS.values())
        raise MXError(
            f"algorithms must be a preset's name, a tuple of {names}, or a mapping from {', '.join(ALGORITHMS)} to "
            f"their options, not {passed!r}"
        )
    if len(by_kind) < len(passed) or not passed:
        raise MXError(f"algorithms={passed!r} must name at least one algorithm, and each once")
    return tuple(by_kind[kind] for kind in ALGORITHMS.values() if kind in by_kind)


def folded_rotation(algorithms: tuple[Algorithm, ...]) -> Rotation | None:
    """Return the rotation that is folded into weights; None without one."""
    for algorithm in algorithms:
        if isinstance(algorithm, Rotation) and not algorithm.online:
            return algorithm
    return None


def look_at_inputs(algorithms: tuple[Algorithm, ...]) -> bool:
    """True if an algorithm needs batches."""
    looks = (Smoothing, GPTQ, LearnedRounding)
    return ScaleSearch(by_inputs=True) in algorithms or any(isinstance(one, looks) for one in algorithms)


def plain_algorithms(algorithms: tuple[Algorithm, ...]) -> str | dict[str, dict[str, Any]]:
    """The form of a recipe: the name of a preset, or options by the names of algorithms."""
    for name, preset in PRESETS.items():
        if preset == algorithms:
            return name
    names = {kind: name for name, kind in ALGORITHMS.items()}
    return {names[type(one)]: asdict(one) for one in algorithms}  # type: ignore[call-overload]


def _made(name: object, options: object) -> Algorithm:
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise MXError(f"unknown algorithm {name!r}: {nearest(str(name), list(ALGORITHMS))}")
    kind = ALGORITHMS[name]
    allowed = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(options, Mapping | None):
        raise MXError(f"algorithm {name}: its options must be a mapping, not {options!r}")
    for option in options or ():
        if option not in allowed:
            raise MXError(f"algorithm {name}: unknown option {option!r}: allowed: {', '.join(allowed) or 'none'}")
    return kind(**(options or {}))
