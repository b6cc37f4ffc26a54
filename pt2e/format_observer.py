"""`MXFormatObserver`: what each of several formats would do to a tensor, in one calibration pass."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from pt2mx.analysis.sums import QuantizationStatistics
from pt2mx.errors import MXError
from pt2mx.ops.checks import operator_modes
from pt2mx.pt2e.collector import StatisticsCollector
from pt2mx.pt2e.observer import MXObserver
from pt2mx.spec import MXSpec, parse

#: meta key of a `dequantize_mx` node: what was observed of its tensor under each candidate, by `str` of the spec
CANDIDATES_KEY = "mx_candidates"

#: the formats of the OCP specification by their widths, and INT8
DEFAULT_CANDIDATES = ("mxfp4", "mxfp6", "mxfp8", "mxint8")


class MXFormatObserver(MXObserver):
    """An `MXObserver` that collects the same statistics for other formats too, so that one calibration pass answers
    which format each tensor can stand. Ask for it in the config, and let `suggest_config` choose:

        MXQuantizationConfig(weight="mxfp8", observer=MXFormatObserver.with_args(candidates=("mxfp4", "mxfp8")))

    The spec of the annotation is what fake quantization and convert apply; the candidates change no number.

    Args:
        qscheme, fake_quant, observe: as in `MXObserver`.
        candidates: formats in any spelling that `pt2mx.parse` takes. Their blocks run along the axis of the annotation.

    Raises:
        MXError: for no candidate, or one that is no format or whose scale is not E8M0.
    """

    def __init__(self, qscheme: tuple, *, candidates: Iterable[object] = DEFAULT_CANDIDATES, **options: object) -> None:
        super().__init__(qscheme, **options)
        specs = [spec.replace(axis=self.spec.axis) for spec in _specs(candidates)]
        # by name, so that a state_dict does not load into other candidates
        self.candidates = nn.ModuleDict({str(spec): StatisticsCollector(spec) for spec in specs})

    def collect(self, x: Tensor) -> None:
        super().collect(x)
        for candidate in self.candidates.values():
            candidate.collect(x)

    def reset_statistics(self) -> None:
        super().reset_statistics()
        for candidate in self.candidates.values():
            candidate.reset_statistics()

    @property
    def candidate_statistics(self) -> dict[str, QuantizationStatistics]:
        """What was collected so far of each candidate, by `str` of its spec; empty before the first tensor."""
        seen = {name: candidate.statistics for name, candidate in self.candidates.items()}
        return {name: statistics for name, statistics in seen.items() if statistics is not None}

    def statistics_meta(self) -> dict[str, object]:
        return {**super().statistics_meta(), CANDIDATES_KEY: self.candidate_statistics}


def _specs(candidates: object) -> list[MXSpec]:
    if isinstance(candidates, str | MXSpec) or not isinstance(candidates, Iterable):
        raise MXError(f"candidates={candidates!r} must be several formats, for example ('mxfp4', 'mxfp8')")
    specs = [parse(candidate) for candidate in candidates]
    if not specs:
        raise MXError(f"candidates={candidates!r} names no format: give some, for example ('mxfp4', 'mxfp8')")
    for spec in specs:
        operator_modes(spec)  # the graph holds operators, which take some specs only
    return specs
