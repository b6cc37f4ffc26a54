"""`MXFormatObserver`: statistics of several formats for each tensor, in one calibration pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from pt2mx.analysis.sums import QuantizationStatistics
from pt2mx.errors import MXError
from pt2mx.pt2e.observe.observer import MXObserver, StatisticsCollector
from pt2mx.spec import MXSpec, parse

#: meta key of a `dequantize_mx` node: the statistics of its tensor in each candidate, by `str` of the spec
CANDIDATES_KEY = "mx_candidates"

#: the formats of the OCP specification by their widths, and INT8
DEFAULT_CANDIDATES = ("mxfp4", "mxfp6", "mxfp8", "mxint8")


class MXFormatObserver(MXObserver):
    """Collect the statistics of an `MXObserver` for several formats, so that one calibration pass compares them.

    A config requests it with `with_args`; `suggest_config` chooses formats from its statistics. Fake quantization and
    conversion apply the spec of the annotation; the candidates change no output.

    Args:
        qscheme: as in `MXObserver`.
        candidates: formats, as `pt2mx.parse` takes them; by default FP4, FP6, FP8 and INT8. Their blocks run along the
            axis of the annotation.
        options: `fake_quant` and `observe`, as in `MXObserver`.

    Raises:
        MXError: for no candidate, an unknown format, and an E8M0 scale of another width.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 64).reshape(1, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> observer = pt2mx.MXFormatObserver.with_args(candidates=("mxfp4", "mxint8"))
        >>> config = pt2mx.MXQuantizationConfig(activation="mxfp8", observer=observer)
        >>> prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer().set_global(config))
        >>> _ = prepared(x)
        >>> (seen,) = [m for m in prepared.modules() if isinstance(m, pt2mx.MXFormatObserver)]
        >>> {name: round(statistics.sqnr) for name, statistics in seen.candidate_statistics.items()}  # dB
        {'mxfp4_e2m1{32}': 20, 'mxint8{32}': 42}
    """

    def __init__(self, qscheme: tuple, *, candidates: Iterable[object] = DEFAULT_CANDIDATES, **options: Any) -> None:
        super().__init__(qscheme, **options)
        specs = [spec.replace(axis=self.spec.axis) for spec in _specs(candidates)]
        # by name, so that a state_dict does not load into other candidates
        self.candidates = nn.ModuleDict({str(spec): StatisticsCollector(spec) for spec in specs})

    def collect(self, x: Tensor) -> None:
        """Add a tensor to the sums of the spec and of each candidate.

        Args:
            x: (..., n, ...) float32, float16 or bfloat16.
        """
        super().collect(x)
        for candidate in self._collectors().values():
            candidate.collect(x)

    def reset_statistics(self) -> None:
        """Reset the statistics."""
        super().reset_statistics()
        for candidate in self._collectors().values():
            candidate.reset_statistics()

    def _collectors(self) -> dict[str, StatisticsCollector]:
        return {name: module for name, module in self.candidates.items() if isinstance(module, StatisticsCollector)}

    @property
    def candidate_specs(self) -> list[MXSpec]:
        """The specs of the candidates."""
        return [candidate.spec for candidate in self._collectors().values()]

    @property
    def candidate_statistics(self) -> dict[str, QuantizationStatistics]:
        """The statistics so far of each candidate, by `str` of its spec; empty before the first tensor."""
        seen = {name: candidate.statistics for name, candidate in self._collectors().items()}
        return {name: statistics for name, statistics in seen.items() if statistics is not None}

    def statistics_meta(self) -> dict[str, object]:
        """Return the meta of `MXObserver.statistics_meta`, and the statistics of the candidates.

        Returns:
            `QuantizationStatistics` under `STATISTICS_KEY`; `candidate_statistics` under `CANDIDATES_KEY`.
        """
        return {**super().statistics_meta(), CANDIDATES_KEY: self.candidate_statistics}


def _specs(candidates: object) -> list[MXSpec]:
    if isinstance(candidates, str | MXSpec) or not isinstance(candidates, Iterable):
        raise MXError(f"candidates={candidates!r} must be several formats, for example ('mxfp4', 'mxfp8')")
    specs = [parse(candidate) for candidate in candidates]
    if not specs:
        raise MXError(f"candidates={candidates!r} names no format: give some, for example ('mxfp4', 'mxfp8')")
    for spec in specs:
        spec.check_operators()
    return specs
