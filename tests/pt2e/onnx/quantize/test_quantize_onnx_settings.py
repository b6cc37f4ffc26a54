import pytest
from onnx import TensorProto, helper

from pt2mx import MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.onnx.nodes import FakeQuantizeMX
from tests.onnx_float_files import (
    model_of,
    old_network,
    weight,
)
from tests.onnx_nodes import differences
from tests.onnx_quantized_files import FP4, IMAGES, WEIGHTS, quantized, specs

FP8 = MXQuantizationConfig(weight="mxfp8", activation="mxfp8")
NAMES = ["conv1", "ConvTranspose_2", "grouped", "fc", "head"]


@pytest.mark.parametrize(
    ("settings", "skipped"),
    [
        (lambda q: q.set_module_name("conv1", None), {"conv1": "excluded by module_name 'conv1'"}),
        (lambda q: q.set_module_name("up", None), {"ConvTranspose_2": "excluded by module_name 'up'"}),
        (lambda q: q.set_module_name_regex("conv.|f.*", None), {
            "conv1": "excluded by module_name_regex 'conv.|f.*'", "fc": "excluded by module_name_regex 'conv.|f.*'",
        }),
        (lambda q: q.set_module_type("Conv", None), {
            "conv1": "excluded by module_type 'Conv'", "grouped": "excluded by module_type 'Conv'",
        }),
        (lambda q: q.set_operator_type("aten.matmul", None), {"head": "excluded by operator_type 'aten.matmul'"}),
        (lambda q: q.set_first(None).set_last(None), {"conv1": "excluded by first 1", "head": "excluded by last 1"}),
        (lambda q: q.set_filter_function(lambda node: node.name != "fc"), {"fc": "excluded by the filter function"}),
    ],
)  # fmt: skip
def test_exclusions(tmp_path, settings, skipped):
    report, model = quantized(old_network(18, 10), tmp_path, settings(MXQuantizer().set_global(FP8)))
    assert {o.name: o.reason for o in report.operators if not o.quantized} == skipped
    assert [o.name for o in report.operators] == NAMES
    inputs = {name for node in model.graph.node if node.name in skipped for name in node.input}
    assert not any(name.endswith("_mx") for name in inputs)


def test_settings_of_single_nodes_and_unmatched_ones(tmp_path):
    quantizer = MXQuantizer().set_global(FP8).set_module_name("fc", FP4).set_last(WEIGHTS)
    _, model = quantized(old_network(18, 10), tmp_path, quantizer)
    elements = {name: spec[0] for name, spec in specs(model).items()}
    assert elements["fc.weight_mx"] == "fp4_e2m1" and elements["w2_mx"] == "fp6_e3m2" and "g_mx" not in elements
    with pytest.warns(UserWarning, match="module_name 'conv2' matches no operator of the model; did you mean 'conv1'"):
        quantized(old_network(18, 10), tmp_path, MXQuantizer().set_global(FP8).set_module_name("conv2", None))


def test_names_with_slashes(tmp_path):
    nodes = [helper.make_node("MatMul", [a, b], [c], f"/encoder/{c}/MatMul") for a, b, c in ("xwh", "hwy")]
    floats = model_of(nodes, {"x": (TensorProto.FLOAT, [3, 40])}, {"y": 2}, {"w": weight(40, 40)})
    for name in ("encoder.h", "/encoder/h/MatMul", "encoder.h.MatMul"):
        report, _ = quantized(floats, tmp_path, MXQuantizer().set_global(FP8).set_module_name(name, None))
        assert [o.quantized for o in report.operators] == [False, True]


def test_dictionary_of_quark(tmp_path):
    attributes = {"element_dtype": "int8", "axis": 1, "block_size": 16, "rounding_mode": 0}
    _, model = quantized(old_network(18, 10), tmp_path, attributes)
    activations = {(a.spec.element.name, a.spec.block_size, a.spec.rounding) for _, a in FakeQuantizeMX.nodes_in(model)}
    assert activations == {("int8_full", 16, "half_away")}
    assert specs(model)["w2_mx"] == ("int8_full", 16, -1, 24)
    assert set(differences(model, {"x": IMAGES}).values()) == {0}
