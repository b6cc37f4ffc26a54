"""`MXAccumulator`, the module that a prepared model calls in place of an operator whose products a register adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from pt2mx.analysis.sums import sqnr_db
from pt2mx.fx.training.train_eval import in_backward_pass
from pt2mx.pt2e.observe.flags import Switched

#: meta key of an accumulated operator's node: the SQNR in dB of its sums that calibration found
SUMS_KEY = "mx_sums"


class MXAccumulator(Switched):
    """Return what a register adds up to, or torch's own sums, and collect the difference of the two.

    Calibration measures it on values that are not quantized yet: the share of the error that the register adds.

    Args:
        operator: torch's, whose arguments the module takes.
        accumulated: the operator of `pt2mx.ops.accumulated` that computes the same.
        args: its arguments; those at `places` have no meaning.
        places: its argument -> the position of the operator's that it gets.
        fake_quant: True to start with the register's sums.
        observe: True to start with the collection of differences.
    """

    signal: Tensor
    noise: Tensor

    def __init__(
        self,
        operator: OpOverload,
        accumulated: OpOverload,
        args: Sequence[Any],
        places: Mapping[int, int],
        *,
        fake_quant: bool,
        observe: bool,
    ) -> None:
        super().__init__()
        self.operator, self.accumulated = operator, accumulated
        self.args = [None if i in places else arg for i, arg in enumerate(args)]
        self.places = tuple(places.items())
        self.fake_quant_enabled, self.observer_enabled = fake_quant, observe
        for name in ("signal", "noise"):
            self.register_buffer(name, torch.zeros(1, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result = self.sums(args) if self.fake_quant_enabled else self.operator(*args, **kwargs)
        if self.observer_enabled and not in_backward_pass():
            with torch.no_grad():
                if self.fake_quant_enabled:
                    self.collect(self.operator(*args, **kwargs), result)
                else:
                    self.collect(result, self.sums(args))
        return result

    def sums(self, args: Sequence[Any]) -> Tensor:
        """Return the register's sums for the operator's positional arguments."""
        given = list(self.args)
        for place, position in self.places:
            given[place] = args[position]
        return self.accumulated(*given)

    @torch.no_grad()
    def collect(self, y: Tensor, sums: Tensor) -> None:
        """Add the squares of torch's result, and of its difference from the register's."""
        wide = y.double()
        self.signal += wide.square().sum()
        self.noise += (sums.double() - wide).square().sum()

    @property
    def spelling(self) -> str:
        """The accumulator, as `pt2mx.parse_accumulator` spells it."""
        return str(self.args[-1])

    @property
    def sqnr(self) -> float | None:
        """The SQNR in dB of all results so far; None before the first."""
        return sqnr_db(float(self.signal), float(self.noise)) if self.signal else None

    def reset_statistics(self) -> None:
        """Reset the sums of squares."""
        self.signal.zero_()
        self.noise.zero_()
