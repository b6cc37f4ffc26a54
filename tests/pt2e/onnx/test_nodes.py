import onnx
import pytest
from onnx import helper

from pt2mx import MXSpec
from pt2mx.pt2e.onnx.nodes import DOMAIN, DequantizeMX, FakeQuantizeMX, graphs_in

FAKE = FakeQuantizeMX(MXSpec("fp6_e3m2", 16, 1, "rceil", "half_away"), 48)
DEQUANTIZE = DequantizeMX(MXSpec("fp4_e2m1"), 64, onnx.TensorProto.FLOAT16)


@pytest.mark.parametrize(("attributes", "inputs"), [(FAKE, ["X"]), (DEQUANTIZE, ["codes", "scale"])])
def test_attributes_are_read_as_they_were_written(attributes, inputs):
    node = attributes.make(inputs, "Y", "name")
    assert (node.domain, node.op_type, list(node.input), list(node.output), node.name) == (
        DOMAIN, type(attributes).op_type, inputs, ["Y"], "name",
    )  # fmt: skip
    assert type(attributes).of(node) == attributes
    node.op_type += ".fp4_e2m1_b32"  # the name of its function
    assert type(attributes).of(node) == attributes


def test_other_nodes_are_none():
    assert FakeQuantizeMX.of(DEQUANTIZE.make(["codes", "scale"], "Y")) is None
    assert DequantizeMX.of(FAKE.make(["X"], "Y")) is None
    assert FakeQuantizeMX.of(helper.make_node("FakeQuantizeMX", ["X"], ["Y"], domain="another")) is None


def test_attributes():
    """As files of earlier versions have them, in their order."""
    of_blocks = {"element": "fp6_e3m2", "block_size": 16, "axis": 1, "length": 48, "scale_format": "e8m0"}
    assert list(FAKE.attributes.items()) == [
        *of_blocks.items(), ("block_rows", 1), ("scale_mode", "rceil"), ("rounding", "half_away"),
    ]  # fmt: skip
    assert list(DEQUANTIZE.attributes) == [*of_blocks, "block_rows", "dtype"]
    bare = helper.make_node("DequantizeMX", ["codes", "scale"], ["Y"], domain=DOMAIN, element="fp4_e2m1")
    assert DequantizeMX.of(bare) == DequantizeMX(MXSpec("fp4_e2m1"))


def test_nodes_of_subgraphs():
    inner = helper.make_graph([FAKE.make(["X"], "A")], "inner", [], [])
    outer = helper.make_node("If", ["c"], ["B"], then_branch=inner, else_branch=inner)
    model = helper.make_model(helper.make_graph([FAKE.make(["X"], "Y"), outer], "net", [], []))
    assert [graph.name for graph in graphs_in(model.graph)] == ["net", "inner", "inner"]
    assert [(node.output[0], attributes) for node, attributes in FakeQuantizeMX.nodes_in(model)] == [
        (name, FAKE) for name in ("Y", "A", "A")
    ]
