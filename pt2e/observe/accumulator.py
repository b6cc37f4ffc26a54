"""`MXAccumulator`, the module that a prepared model calls after an operator whose products a register adds."""

from __future__ import annotations

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
        operator: of `pt2mx.ops.accumulated`.
        rest: its last arguments, which calls of the module lack.
        fake_quant: True to start with the register's sums.
        observe: True to start with the collection of differences.
    """

    signal: Tensor
    noise: Tensor

    def __init__(self, operator: OpOverload, rest: tuple[Any, ...], *, fake_quant: bool, observe: bool) -> None:
        super().__init__()
        self.operator, self.rest = operator, rest
        self.fake_quant_enabled, self.observer_enabled = fake_quant, observe
        for name in ("signal", "noise"):
            self.register_buffer(name, torch.zeros(1, dtype=torch.float64))

    def forward(self, y: Tensor, *args: Any) -> Tensor:
        """y: torch's result for the arguments that follow -> a tensor of its shape and dtype."""
        observes = self.observer_enabled and not in_backward_pass()
        if not (observes or self.fake_quant_enabled):
            return y
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.fake_quant_enabled):
            sums = self.operator(*args, *self.rest)
        if observes:
            self.collect(y.detach(), sums.detach())
        return sums if self.fake_quant_enabled else y

    @torch.no_grad()
    def collect(self, y: Tensor, sums: Tensor) -> None:
        """Add the squares of torch's result, and of its difference from the register's."""
        wide = y.double()
        self.signal += wide.square().sum()
        self.noise += (sums.double() - wide).square().sum()

    @property
    def spelling(self) -> str:
        """The accumulator, as `pt2mx.parse_accumulator` spells it."""
        return self.rest[-1]

    @property
    def sqnr(self) -> float | None:
        """The SQNR in dB of all results so far; None before the first."""
        return sqnr_db(float(self.signal), float(self.noise)) if self.signal else None

    def reset_statistics(self) -> None:
        """Reset the sums of squares."""
        self.signal.zero_()
        self.noise.zero_()
