"""`optimization_report`: the error of each weight before and after `optimize`."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

from torch.fx import GraphModule

from pt2mx.analysis.tables import text_table
from pt2mx.errors import MXError
from pt2mx.spec import MXSpec

#: meta key of an optimized model
REPORT_KEY = "mx_optimization"

_HEADINGS = ("weight", "format", "algorithm", "smoothed", "rotated", "error before", "after", "why not")


@dataclass(frozen=True)
class WeightReport:
    """The error of one weight, and what changed it.

    Args:
        weight: its qualified name.
        modules: the modules that use it.
        spec: its format; None where operators quantize it differently.
        algorithm: "gptq", "scales", or "" where the weight did not change.
        smoothed: the parameters into which the inverse factors of the input channels were folded, "div" if the graph
            divides by them, "" without smoothing.
        rotated: number of values that are rotated together; 0 without rotation.
        before, after: the relative squared error with rounding to nearest, and now. It is measured on the weight's
            matmuls with the calibration inputs, on an embedding's rows weighted by how often they were looked up, or on
            the weight itself if neither was observed. NaN if no rounding was tried. For a smoothed or rotated weight,
            `before` is the error of the transformed weight.
        reason: why a better algorithm did not apply; "" where it did.
    """

    weight: str
    modules: str
    spec: MXSpec | None
    algorithm: str
    smoothed: str
    rotated: int
    before: float
    after: float
    reason: str


@dataclass(frozen=True)
class OptimizationReport:
    """The weights that a quantizer quantizes, in execution order.

    Args:
        weights: a `WeightReport` for each.
    """

    weights: tuple[WeightReport, ...]

    def to_table(self) -> str:
        """Return the report as a text table.

        Returns:
            A line for each weight; errors are relative to the energy of the values.
        """
        rows = [_HEADINGS]
        for w in self.weights:
            errors = _share(w.before), _share(w.after)
            rows.append((w.weight, str(w.spec or ""), w.algorithm, w.smoothed, str(w.rotated or ""), *errors, w.reason))
        return text_table(rows)


def _share(error: float) -> str:
    return "" if isnan(error) else f"{error:.2e}"


def optimization_report(model: GraphModule) -> OptimizationReport:
    """Return the report of a model that `optimize` returned.

    Args:
        model: that model; models prepared or converted from it have the report too.

    Returns:
        An `OptimizationReport`: for each weight its format, the algorithm, its error before and after.

    Raises:
        MXError: for another model.

    Example:
        >>> import torch, pt2mx
        >>> x = torch.linspace(-1, 1, 128).reshape(2, 64)
        >>> exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
        >>> optimized = pt2mx.optimize(exported, pt2mx.MXQuantizer.from_recipe("mxfp4"), [(x,)])
        >>> (weight,) = pt2mx.optimization_report(optimized).weights
        >>> weight.weight, weight.algorithm, weight.after < weight.before
        ('weight', 'gptq', True)
    """
    report = model.meta.get(REPORT_KEY) if isinstance(model, GraphModule) else None
    if not isinstance(report, OptimizationReport):
        raise MXError("the model has no report of an optimization: pass what pt2mx.optimize returned")
    return report
