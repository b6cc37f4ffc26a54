from pt2mx.algorithms.options import PRESETS
from pt2mx.pt2e.checkpoints.layouts import LAYOUTS
from pt2mx.pt2e.cli import argument
from pt2mx.pt2e.onnx.export import DIALECTS, OPSETS
from pt2mx.pt2e.sensitivity.compare_recipes import OTHER_FORMATS
from pt2mx.pt2e.sensitivity.metrics import METRICS
from pt2mx.pt2e.sensitivity.results import OPERANDS
from pt2mx.pt2e.sensitivity.sensitivity import METHODS


def test_choices_are_those_of_the_python_api():
    """Their modules import torch, which a command line is checked without."""
    assert argument.PRESETS == tuple(PRESETS)
    assert argument.LAYOUTS == tuple(LAYOUTS)
    assert argument.OPSETS == (OPSETS[0], OPSETS[-1])
    assert argument.TARGETS == tuple(DIALECTS)
    assert argument.OTHER_FORMATS == OTHER_FORMATS
    assert argument.METRICS == tuple(METRICS)
    assert argument.OPERANDS == OPERANDS
    assert argument.METHODS == tuple(METHODS)
