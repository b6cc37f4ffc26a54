"""`StatisticsCollector`: the running sums of a spec's statistics, as buffers of a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pt2mx.analysis.sums import QuantizationStatistics, quantization_sums
from pt2mx.errors import MXError
from pt2mx.pt2e.torchao_pt2e import is_fake
from pt2mx.spec import MXSpec


class StatisticsCollector(nn.Module):
    """Adds up `quantization_sums` of the tensors that it is shown. The sums are buffers, so that they move, copy, save
    and load with the model that holds them.

    Args:
        spec: the spec of which statistics are collected.
    """

    tensors: Tensor  # and so on, a buffer for each of `_no_sums`
    values: Tensor

    def __init__(self, spec: MXSpec) -> None:
        nn.Module.__init__(self)  # not the next class' in line: an observer has others among its bases
        self.spec = spec
        for name, value in _no_sums().items():
            self.register_buffer(name, value)

    @torch.no_grad()
    def collect(self, x: Tensor) -> None:
        """Add a tensor to the sums.

        Args:
            x: (..., n, ...) float32, float16 or bfloat16.

        Raises:
            MXError: inside `torch.cond` and the like while gradients are recorded: these are traced, without values.
        """
        if not torch.compiler.is_dynamo_compiling() and is_fake(x) and not is_fake(self.values):
            raise MXError(
                "a graph inside the model is traced for its gradient, so that there is nothing to observe in it: "
                "calibrate under torch.no_grad(), or call disable_observer(model)"
            )
        for name, value in quantization_sums(x.detach(), self.spec).items():
            getattr(self, name).add_(value)

    @property
    def statistics(self) -> QuantizationStatistics | None:
        """The statistics of all tensors so far; None before the first."""
        return QuantizationStatistics.from_sums({name: getattr(self, name) for name in _no_sums()})

    def reset_statistics(self) -> None:
        """Forget what was collected."""
        for name in _no_sums():
            getattr(self, name).zero_()


def _no_sums() -> dict[str, Tensor]:
    counts = ("tensors", "empty", "values", "nonfinite", "saturated", "flushed")
    sums = {name: torch.zeros((), dtype=torch.int64) for name in counts}
    # (1,), not 0-d: torch.compile takes a 0-d float64 CPU tensor for a Python number, and loses what is written to it
    sums |= {name: torch.zeros(1, dtype=torch.float64) for name in ("signal", "noise")}
    return {**sums, "exponents": torch.zeros(256, dtype=torch.int64)}
