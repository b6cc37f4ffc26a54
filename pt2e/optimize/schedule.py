"""The steps of a training, and their rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from numbers import Real

from pt2mx.errors import MXError, check_integer, nearest

#: how a rate decays: the share of the steps behind it -> the factor of the rate
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "constant": lambda share: 1.0,
}

#: setting -> the least integer that it takes
_LEAST = {"epochs": 1, "warmup": 0, "accumulate": 1, "evaluations": 1}


@dataclass(frozen=True)
class Schedule:
    """The steps of a training.

    Args:
        epochs: passes over the batches.
        lr: the highest rate.
        decay: how the rate decays to zero, a key of `DECAYS`.
        warmup: the steps in which the rate rises to `lr`.
        accumulate: the batches of a step on each rank, whose gradients are averaged.
        evaluations: how often an epoch evaluates the held-out batches, and writes the checkpoint.
        seed: of the choice of held-out batches, the order of the others, and dropout.
    """

    epochs: int = 1
    lr: float = 2e-4
    decay: str = "linear"
    warmup: int = 0
    accumulate: int = 1
    evaluations: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_integer(name, getattr(self, name), least)
        if not isinstance(self.lr, Real) or not 0 < self.lr < math.inf:
            raise MXError(f"lr={self.lr!r} must be a finite number above 0")
        if self.decay not in DECAYS:
            raise MXError(f"unknown decay {self.decay!r}: {nearest(str(self.decay), list(DECAYS))}")

    def steps(self, batches: int, ranks: int) -> int:
        """Return the number of steps of a training on so many batches an epoch, shared by the ranks.

        Raises:
            MXError: where the warm-up is no shorter.
        """
        steps = -(-self.epochs * batches // (self.accumulate * ranks))
        if self.warmup >= steps:
            raise MXError(f"warmup={self.warmup} must be less than the number of steps, which is {steps}")
        return steps

    def rate(self, step: int, steps: int) -> float:
        """Return the rate of a step of `steps`."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        return self.lr * DECAYS[self.decay]((step - self.warmup) / (steps - self.warmup))

    def settings(self) -> dict[str, object]:
        """Return what decides the order of the batches and the rates; more ranks may accumulate fewer batches."""
        return {name: value for name, value in asdict(self).items() if name != "accumulate"}
