"""Reports for tests of their pages: a report of a model with everything that a page can show, and reports made by
hand."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

import pt2mx
from pt2mx import MXFormatObserver, MXQuantizationConfig, MXQuantizer
from pt2mx.analysis.sums import QuantizationStatistics
from pt2mx.pt2e.report.report import QuantizationReport
from pt2mx.pt2e.report.results import RecipeComparison, RecipeRow
from pt2mx.pt2e.report.rows import OperandReport, OperatorReport
from pt2mx.pt2e.report.speed import Speed
from tests.flow import calibrated, exported

#: names that are markup, an end of a script, a template's field, a word of JavaScript, other scripts, or very long
HOSTILE = (
    "<script>document.title='broken'</script>",
    "</script><img src=x onerror=\"document.title='broken'\">",
    "<!--",
    "\"quoted\" 'names' & {{data}} $& \\1",
    "Infinity",
    "constructor",
    "__proto__",
    "слой.層.🙂.\u202e\u2028\ud800",
    "layer." + "very_long_" * 60,
)


class Stack(nn.Module):
    """Layers in a row, one of them with values that saturate, and a head."""

    def __init__(self, count: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(count))
        self.head = nn.Linear(64, 16)
        with torch.no_grad():
            self.layers[3].weight.copy_(self.layers[3].weight.sign() * 7.9 / 64)  # FP4 ends at 6

    def forward(self, x: Tensor) -> Tensor:  # (B, 64) -> (B, 16)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def full_report() -> SimpleNamespace:
    """A `report`, and the arguments `more` of its page."""
    inputs = torch.randn(16, 64)
    graph = exported(Stack().eval(), inputs)
    observer = MXFormatObserver.with_args(candidates=("mxfp4", "mxfp8"))
    config = MXQuantizationConfig(weight="mxfp4", activation="mxfp8", observer=observer)
    quantizer = MXQuantizer().set_global(config).set_module_name("head", None)
    converted = pt2mx.convert_pt2e(calibrated(graph, quantizer, inputs))
    report = pt2mx.quantization_report(converted)
    sizes = {"float": (report.bytes_before, 1.0), "mxfp8": (36_000, 0.9987), "mxfp4": (20_000, 0.9712)}
    rows = [RecipeRow(name, size, 8 * size / report.values, quality) for name, (size, quality) in sizes.items()]
    rows += [RecipeRow("worse", 40_000, 9.0, 0.95), RecipeRow("failed", note="it selects no operator of the model")]
    speed = Speed({"bfloat16": 9 * [0.002], "mxfp4": 9 * [0.003]}, {"float32": "it does not compile"}, "a processor", 2)
    more = {
        "model": "a stack of layers",
        "recipe": "mxfp4",
        "quality": {"cosine": 0.9712, "SQNR in dB": 12.5},
        "comparison": RecipeComparison.of("cosine", True, rows, speed),
        "sensitivity": pt2mx.sensitivity(graph, [inputs], ["mxfp4", "mxfp8"], metric="noise"),
        "before": graph,
        "after": converted,
    }
    return SimpleNamespace(report=report, more=more)


def statistics(sqnr: float, **changed: object) -> QuantizationStatistics:
    """Return the statistics of one tensor of 64 values in two blocks."""
    counts = {"tensors": 1, "empty": 0, "values": 64, "nonfinite": 0, "nan_blocks": 0}
    fields = {**counts, "sqnr": sqnr, "saturated": 0.0, "flushed": 0.25, "exponents": {-3: 1, 2: 1}}
    return QuantizationStatistics(**{**fields, **changed})


def operator(module: str, *sqnr: float, reason: str | None = None) -> OperatorReport:
    """Return the row of a matmul whose weights have these ratios."""
    operands = [OperandReport("weight", "mxfp4_e2m1{32}", statistics(db), {}, 64, 256, 34) for db in sqnr]
    return OperatorReport(f"{module}/linear", module, "aten.linear", tuple(operands), reason)


def report_of(*operators: OperatorReport) -> QuantizationReport:
    """A report of 64 values each."""
    count = len(operators)
    return QuantizationReport(operators, values=64 * count, bytes_before=256 * count, bytes_after=34 * count)
