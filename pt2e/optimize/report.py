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
        modules: the modules that read it.
        spec: its format; None where several readers differ.
        algorithm: "gptq", "scales", or "" where it stayed.
        smoothed: the parameters into which the factors of its input's channels were folded, "div" where the graph
            divides by them, "" where there are none.
        rotated: values that are rotated together, with the inputs of its products; 0 where none are.
        before, after: the squared error over the squared value, of the weight's products with the inputs of the
            calibration, of an embedding's rows as often as it read them, or of the weight itself where nothing was
            seen; rounded to nearest, and as it is now. NaN where rounding was not tried. Of a smoothed or rotated
            weight the former is that of the changed one.
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
    """The weights that a quantizer chose, in the order of execution.

    Args:
        weights: a `WeightReport` for each.
    """

    weights: tuple[WeightReport, ...]

    def to_table(self) -> str:
        """Return the report as a table of text.

        Returns:
            A line for each weight; errors are shares of the value's energy.
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
        model: that model; what is prepared or converted from it has the report too.

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
