"""The target "quark" of exported and of quantized files."""

import onnx
import pytest
import torch
from onnx import TensorProto, helper

import pt2mx
from pt2mx import FORMATS, MXError, MXSpec, export_onnx, quark
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX
from pt2mx.pt2e.onnx.quark import attributes_of, onnx_functions, quark_nodes, to_quark
from tests.compare import same
from tests.onnx_nodes import run


def model_of(*nodes, shape=(None, 40)):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("pt2mx", 1)]
    graph = helper.make_graph(list(nodes), "net", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.diagonal
@pytest.mark.parametrize("rounding", ["even", "half_away", "half_up"])
@pytest.mark.parametrize("element", [*FORMATS, "int8_full"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_attributes_are_those_of_the_spec(element, rounding, axis):
    spec = MXSpec(element, 16, axis, rounding=rounding)
    attributes = attributes_of(spec)
    expressible = element == "int8_full" or (element != "int8" and rounding == "even")
    assert (attributes is not None) == expressible
    if attributes is not None:
        assert quark.mx_spec(attributes) == spec
    assert attributes_of(spec.replace(scale_mode="even")) is None


def test_quarks_nodes_replace_ours_and_run():
    torch.manual_seed(0)
    specs = [
        MXSpec("fp4_e2m1"),
        MXSpec("int8_full", 16, rounding="half_up"),
        MXSpec("fp4_e2m1"),
        MXSpec("fp8_e5m2", axis=0),
    ]
    names = ["x", "a", "b", "c", "y"]
    nodes = [FakeQuantizeMX(s).make([i], o, f"{o}_node") for s, i, o in zip(specs, names, names[1:], strict=False)]
    model = to_quark(model_of(*nodes))
    onnx.checker.check_model(model)
    assert {(node.domain, node.op_type) for node in model.graph.node} == {("com.amd.quark", "MXQuantizeDequantize")}
    assert [node.name for node in model.graph.node] == ["a_node", "b_node", "c_node", "y_node"]
    by_node = [{a.name: helper.get_attribute_value(a) for a in node.attribute} for node in model.graph.node]
    assert by_node[1] == {"element_dtype": b"int8", "axis": -1, "block_size": 16, "rounding_mode": 1}
    assert [node.overload for node in model.graph.node] == [
        "", "int8_full_floor_half_up_b16_any", "", "fp8_e5m2_floor_even_b32_any_axis0",
    ]  # fmt: skip
    x = want = torch.randn(9, 40)
    for attributes in by_node:
        want = quark.mx_quantize_dequantize(want, attributes | {"element_dtype": attributes["element_dtype"].decode()})
    assert same(run(model, x)[0], want)


def test_packed_weights_stay_packed():
    node = DequantizeMX(MXSpec("fp4_e2m1"), 40).make(["codes", "scale"], "w", "weight")
    fake = FakeQuantizeMX(MXSpec("fp4_e2m1")).make(["x"], "h", "activation")
    model = model_of(node, fake, helper.make_node("Mul", ["h", "w"], ["y"]))
    scale, codes = torch.ops.pt2mx.quantize_mx(torch.ones(40), "fp4_e2m1", 32, -1, "floor", "even")
    constants = {"codes": codes, "scale": scale}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v.numpy(), name) for name, v in constants.items())
    model = to_quark(model)
    assert [node.domain for node in model.graph.node] == ["pt2mx", "com.amd.quark", ""]
    assert len(model.functions) == 2
    x = torch.randn(3, 40)
    assert same(run(model, x)[0], quark.mx_quantize_dequantize(x, {"element_dtype": "fp4_e2m1"}))


@pytest.mark.parametrize(
    "spec",
    [MXSpec("int8"), MXSpec("fp4_e2m1", scale_mode="even"), MXSpec("fp8_e3m4"), MXSpec("fp8_e4m3", rounding="half_up")],
)
def test_specs_that_quark_does_not_have(spec):
    node = FakeQuantizeMX(spec).make(["x"], "y", "layer.0")
    with pytest.raises(MXError, match=r"layer\.0: Quark has no node of mx" + spec.element.name):
        to_quark(model_of(node))


@pytest.mark.compiled
def test_an_exported_program(tmp_path):
    layer, x = torch.nn.Linear(70, 8).eval(), torch.randn(3, 70)
    prepared = pt2mx.prepare_pt2e(torch.export.export(layer, (x,)).module(), pt2mx.MXQuantizer.from_recipe("mxfp8"))
    converted = pt2mx.convert_pt2e(prepared)
    export_onnx(converted, tmp_path / "net.onnx", (x,), target="quark")
    (node,) = quark_nodes(onnx.load(tmp_path / "net.onnx"))
    assert {a.name: helper.get_attribute_value(a) for a in node.attribute} == {
        "element_dtype": b"fp8_e4m3", "axis": -1, "block_size": 32, "rounding_mode": 2,
    }  # fmt: skip
    assert torch.allclose(run(str(tmp_path / "net.onnx"), x)[0], converted(x), atol=1e-6)
    onnx_functions(tmp_path / "net.onnx")  # the nodes have functions already
