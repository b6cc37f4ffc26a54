from pt2mx.algorithms.options import PRESETS
from pt2mx.analysis.metrics import METRICS
from pt2mx.pt2e.checkpoints.destinations import DESTINATIONS
from pt2mx.pt2e.cli import arguments
from pt2mx.pt2e.executorch.export import BACKENDS
from pt2mx.pt2e.models.layouts import LAYOUTS
from pt2mx.pt2e.onnx.export import DIALECTS, OPSETS
from pt2mx.pt2e.onnx.runtime import RUNTIMES
from pt2mx.pt2e.optimize.schedule import DECAYS
from pt2mx.pt2e.report.results import OPERANDS
from pt2mx.pt2e.sensitivity.compare_recipes import OTHER_FORMATS
from pt2mx.pt2e.sensitivity.sensitivity import METHODS


def test_choices_are_those_of_the_python_api():
    """`arguments` repeats the choices, because their modules import torch."""
    assert arguments.PRESETS == tuple(PRESETS)
    assert arguments.DECAYS == tuple(DECAYS)
    assert arguments.LAYOUTS == tuple(LAYOUTS)
    assert arguments.OPSETS == (OPSETS[0], OPSETS[-1])
    assert arguments.DIALECTS == tuple(DIALECTS)
    assert arguments.BACKENDS == tuple(BACKENDS)
    assert arguments.DESTINATIONS == tuple(DESTINATIONS)
    assert arguments.RUNTIMES == tuple(RUNTIMES)
    assert arguments.OTHER_FORMATS == OTHER_FORMATS
    assert arguments.METRICS == tuple(METRICS)
    assert arguments.OPERANDS == OPERANDS
    assert arguments.METHODS == tuple(METHODS)
