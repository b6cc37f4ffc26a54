"""Pickles of older versions load: they name the module and the class of an object as they were."""

import importlib
import pickle

import pytest

from pt2mx import deprecated

#: a class of each old module that keeps its name
KEPT = """
    pt2mx.pt2e.collector:StatisticsCollector pt2mx.pt2e.debug.comparison:StageComparison
    pt2mx.pt2e.language.perplexity:Perplexity pt2mx.pt2e.onnx.float_report:OnnxReport
    pt2mx.pt2e.optimize.hessian_observer:MXHessianObserver pt2mx.pt2e.optimize.index_observer:MXIndexObserver
    pt2mx.pt2e.report.fidelity:Fidelity pt2mx.pt2e.sensitivity.recipe_comparison:RecipeComparison
    pt2mx.pt2e.sensitivity.result:Sensitivity pt2mx.quark.enums:VitisQuantFormat
    pt2mx.pt2e.observer:MXObserver pt2mx.pt2e.fake_quantize:MXFakeQuantize
    pt2mx.pt2e.format_observer:MXFormatObserver pt2mx.pt2e.range_observers:MXMinMaxObserver
    pt2mx.pt2e.tensor_scales:StaticTensorScale pt2mx.pt2e.packed_weights:PackedWeight
    pt2mx.pt2e.provenance:Provenance pt2mx.pt2e.sensitivity.results:Sensitivity
    pt2mx.pt2e.report.agreement:Fidelity pt2mx.preset:Preset
    pt2mx.torchmx.dynamic_weights:MXDynamicActivationMXWeightsConfig
""".split()


def test_every_old_module_is_tested():
    assert {name.partition(":")[0] for name in (*KEPT, *deprecated.CLASSES)} == set(deprecated.MODULES)


@pytest.mark.parametrize("old", [*KEPT, *deprecated.CLASSES])
def test_pickles_of_older_versions(old):
    module, _, name = old.partition(":")
    loaded = pickle.loads(f"c{module}\n{name}\n.".encode())
    new = importlib.import_module(deprecated.MODULES[module])
    assert loaded is getattr(new, deprecated.CLASSES.get(old, name))


def test_a_renamed_class_in_its_module():
    bisect = importlib.import_module("pt2mx.pt2e.debug.bisect")
    assert pickle.loads(b"cpt2mx.pt2e.debug.bisect\nPiece\n.") is bisect.Subgraph
