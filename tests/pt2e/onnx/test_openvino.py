"""The target "openvino": the structure of its files, and their values in OpenVINO where that is installed."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.utils._pytree import tree_leaves

import pt2mx
from pt2mx import MXSpec, convert_pt2e, export_onnx, prepare_pt2e
from pt2mx.pt2e.cli.float_model import export_loaded
from pt2mx.pt2e.models.float_models import load_model
from pt2mx.pt2e.onnx.native import NATIVE
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX
from pt2mx.pt2e.onnx.openvino import to_openvino
from pt2mx.pt2e.onnx.runtime import load
from tests.compare import same
from tests.flow import convert
from tests.language_models import decoder_by_recipe, padded
from tests.onnx_nodes import session
from tests.pt2e.onnx.test_decoder import empty_past, greedy
from tests.random_values import random_values

SMALLEST = np.finfo(np.float32).smallest_normal
ELEMENTS = ("fp4_e2m1", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3", "fp8_e5m2", "int8", "int8_full", "int4")
FORMATS = (*ELEMENTS, "nvfp4", "fp4_e2m1{16}(e4m3_f32_divisor)", "fp8_e4m3{16}(f32)", "fp8_e4m3{16}(e5m3)")
#: formats of weights, with False for a matmul or True for a lookup of rows, which has no blocks of several rows
WEIGHTS = [*((name, rows) for name in FORMATS for rows in (False, True)), ("fp8_e4m3{16x32}(f32)", False)]


def value(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def model_of(nodes, inputs, y, constants=None):
    initializers = [numpy_helper.from_array(v.numpy(), name) for name, v in (constants or {}).items()]
    graph = helper.make_graph(nodes, "net", inputs, [y], initializers)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("pt2mx", 1)]
    return to_openvino(helper.make_model(graph, opset_imports=imports, ir_version=10))


def activation(spec, length=-1, rows=None):
    fake = FakeQuantizeMX(spec, length)
    return model_of([fake.make(["x"], "y", "fq")], [value("x", [rows, 96])], value("y", [rows, 96]))


def weight(spec, rows=False, length=96):
    """Return a matmul with a weight, or a gather of its rows, and the values of the weight."""
    w = torch.randn(48, length) * torch.randn(48, 1).exp()
    w[3, :32] = 0
    t = {"t": pt2mx.tensor_scale_mx(w, spec)} if spec.scale_format.tensor else {}
    scale, codes = pt2mx.quantize_mx(w, spec, tensor_scale=t.get("t"))
    constants = {"c": codes, "s": scale, **t}
    attributes = DequantizeMX(spec, length)
    if rows:
        gathers = [helper.make_node("Gather", [name, "x"], [f"{name}_rows"], axis=0) for name in ("c", "s")]
        nodes = [*gathers, attributes.make(["c_rows", "s_rows", *t], "y", "dq")]
        model = model_of(nodes, [value("x", [None], TensorProto.INT64)], value("y", [None, length]), constants)
    else:
        transpose = helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0])
        matmul = helper.make_node("MatMul", ["x", "wt"], ["y"])
        nodes = [attributes.make(["c", "s", *t], "w", "dq"), transpose, matmul]
        model = model_of(nodes, [value("x", [None, length])], value("y", [None, 48]), constants)
    return model, pt2mx.dequantize_mx(codes, scale, spec, length=length, tensor_scale=t.get("t"))


def check_structure(model):
    """Assert that a model has standard operators alone, tensors of known rank, and no subnormal constant."""
    onnx.checker.check_model(model, full_check=True)
    assert not model.functions and {node.domain for node in model.graph.node} == {""}
    assert all(attribute.type != onnx.AttributeProto.GRAPH for node in model.graph.node for attribute in node.attribute)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    known = {v.name for v in (*inferred.value_info, *inferred.output) if v.type.tensor_type.HasField("shape")}
    assert {name for node in model.graph.node for name in node.output} <= known
    constants = [node.attribute[0].t for node in model.graph.node if node.op_type == "Constant"]
    for constant in (c for c in constants if c.data_type == TensorProto.FLOAT):
        magnitude = np.abs(numpy_helper.to_array(constant))
        assert not ((magnitude > 0) & (magnitude < SMALLEST)).any()


@pytest.mark.parametrize("name", FORMATS)
def test_activations_are_standard_operators_of_static_rank(name):
    spec = pt2mx.parse(name)
    model = activation(spec)
    check_structure(model)
    x = torch.cat([torch.randn(6, 96) * torch.randn(6, 1).exp(), torch.zeros(1, 96)])
    (y,) = session(model).run(None, {"x": x.numpy()})
    assert same(torch.from_numpy(y), pt2mx.fake_quantize_mx(x, spec))


@pytest.mark.parametrize(("name", "rows"), WEIGHTS)
def test_weights_are_standard_operators_of_static_rank(name, rows):
    spec = pt2mx.parse(name)
    model, values = weight(spec, rows)
    check_structure(model)
    is_native = spec.element.name in NATIVE and not rows and spec.block_rows == 1
    types = {tensor.data_type for tensor in model.graph.initializer}
    assert (NATIVE.get(spec.element.name) in types) == is_native
    if not is_native or spec.element.name != "fp4_e2m1":  # onnxruntime has no Cast from FP4
        x = torch.arange(5) if rows else torch.eye(96)
        (y,) = session(model).run(None, {"x": x.numpy()})
        assert torch.equal(torch.from_numpy(y), values[:5] if rows else values.T)


def test_a_weight_with_a_short_block_is_decoded_by_a_function():
    model, values = weight(MXSpec("fp4_e2m1"), length=70)
    check_structure(model)
    assert TensorProto.FLOAT4E2M1 not in {tensor.data_type for tensor in model.graph.initializer}
    (y,) = session(model).run(None, {"x": np.eye(70, dtype=np.float32)})
    assert torch.equal(torch.from_numpy(y), values.T)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_an_exported_program_has_no_functions_and_runs_in_both_runtimes(runtime, tmp_path):
    pytest.importorskip(runtime)
    converted, x = convert(torch.nn.Linear(64, 8).eval(), (torch.randn(4, 64),), "mxfp8"), torch.randn(4, 64)
    assert export_onnx(converted, tmp_path / "net.onnx", (x,), target="openvino") == 2
    check_structure(model := onnx.load(tmp_path / "net.onnx"))
    types = {tensor.data_type for tensor in model.graph.initializer}
    assert types >= {TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E8M0}
    (y,) = load(tmp_path / "net.onnx", runtime).call({"input": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(y), converted(x))


# in OpenVINO


@pytest.mark.parametrize(
    ("name", "codes", "scales"),
    [
        ("mxfp4", "f4e2m1", "f8e8m0"),
        ("mxfp8", "f8e4m3", "f8e8m0"),
        ("mxfp8_e5m2", "f8e5m2", "f8e8m0"),
        ("mxint8", "i8", "f32"),
    ],
)
def test_a_weight_is_the_product_that_plugins_look_for(name, codes, scales, tmp_path):
    """Constants, each converted, their product and a reshape. The CPU plugin holds the codes as they are."""
    openvino = pytest.importorskip("openvino")
    onnx.save(weight(pt2mx.parse(name))[0], tmp_path / "net.onnx")
    graph = openvino.Core().read_model(tmp_path / "net.onnx")
    (node,) = (node for node in graph.get_ops() if node.get_type_name() == "MatMul")
    for port, kind in ((1, "Transpose"), (0, "Reshape"), (0, "Multiply")):
        node = node.input_value(port).get_node()
        assert node.get_type_name() == kind
    converts = [node.input_value(port).get_node() for port in (0, 1)]
    assert {convert.get_type_name() for convert in converts} == {"Convert"}
    types = [convert.get_input_element_type(0) for convert in converts]
    assert types == [getattr(openvino.Type, name) for name in (codes, scales)]
    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).get_runtime_model()
    held = {str(node.get_rt_info()["outputPrecisions"].astype(str)) for node in compiled.get_ops()}
    assert codes in held


@pytest.fixture
def run_openvino(tmp_path):
    """Run a model in OpenVINO."""
    pytest.importorskip("openvino")

    def run(model, x):
        onnx.save(model, tmp_path / "net.onnx")
        return torch.from_numpy(load(tmp_path / "net.onnx", "openvino").call({"x": x.numpy()})["y"])

    return run


@pytest.mark.parametrize(("length", "rows"), [(96, None), (-1, None), (96, 45)])
@pytest.mark.parametrize("name", ELEMENTS)
def test_activations_in_openvino(name, length, rows, run_openvino):
    """The bits are those of pt2mx, but for blocks of subnormal scales. OpenVINO fuses operators of static shapes."""
    spec, x = pt2mx.parse(name), torch.randn(20, 96) * torch.randn(20, 1).exp()
    x = torch.cat([x, *(random_values((6, 96), torch.float32, kind) for kind in (0, 1, 2, 4)), torch.zeros(1, 96)])
    x[1, 3], x[2, 40] = float("nan"), float("inf")
    x = x.where(x.unflatten(1, (3, 32)).abs().amax(2).gt(2.0**-100).repeat_interleave(32, 1) | x.isnan(), 0)
    got, want = run_openvino(activation(spec, length, rows), x), pt2mx.fake_quantize_mx(x, spec)
    assert torch.equal(got.nan_to_num(nan=1.0), want.nan_to_num(nan=1.0)) and torch.equal(got.isnan(), want.isnan())
    tiny = torch.full((1, 96), 2.0**-130)
    assert float(run_openvino(activation(spec, length), tiny).abs().max()) <= 2.0**-120


@pytest.mark.parametrize("rows", [None, 200])
@pytest.mark.parametrize("name", FORMATS[len(ELEMENTS) :])
def test_activations_with_scales_of_a_significand_in_openvino(name, rows, run_openvino):
    """OpenVINO multiplies by a reciprocal where pt2mx divides by a scale: single codes differ."""
    spec, x = pt2mx.parse(name), torch.randn(200, 96)
    got, want = run_openvino(activation(spec, rows=rows), x), pt2mx.fake_quantize_mx(x, spec)
    assert ((got - want).abs() > 1e-5 * want.abs()).float().mean() < 0.02
    assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize(("name", "rows"), WEIGHTS)
def test_weights_in_openvino(name, rows, run_openvino):
    spec = pt2mx.parse(name)
    model, values = weight(spec, rows)
    x = torch.arange(5) if rows else torch.randn(4, 96)
    want = values[:5] if rows else x @ values.T
    assert (run_openvino(model, x) - want).norm() < 1e-6 * want.norm()


def differing_nodes(converted, loaded, inputs, path):
    """Return how many quantized activations of a model have other bits in OpenVINO than pt2mx gives for the node's own
    input, their number, and the relative error of the first output."""
    pytest.importorskip("openvino")
    export_onnx(converted, path, loaded.example, loaded.dynamic_shapes)
    model = onnx.load(path)
    for node in model.graph.node:  # as before they had functions
        node.op_type = node.op_type.partition(".")[0]
    del model.functions[:]
    nodes = list(FakeQuantizeMX.nodes_in(model))
    first = model.graph.output[0].name
    values = dict.fromkeys(name for node, _ in nodes for name in (node.input[0], node.output[0]))
    model = to_openvino(model)
    model.graph.output.extend(value(name, None) for name in values if name != first)
    onnx.save(model, path)
    runnable = load(path, "openvino")
    feeds = {name: x.numpy() for name, x in zip(runnable.inputs, inputs, strict=True)}
    got = {name: torch.from_numpy(y) for name, y in runnable.call(feeds).items()}
    with torch.no_grad():
        want = tree_leaves(converted(*inputs))[0]
    pairs = [(got[node.output[0]], pt2mx.fake_quantize_mx(got[node.input[0]], a.spec)) for node, a in nodes]
    return sum(not torch.equal(y, w) for y, w in pairs), len(pairs), float((got[first] - want).norm() / want.norm())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp4_weight_only", "mxfp8", "mxint8", "mxfp4"])
def test_minilm_in_openvino(recipe, tmp_path):
    """Quantized activations have the bits of pt2mx's for the same values, so that outputs differ only by the order of
    sums. A sum moves a code now and then, and then outputs differ by a percent: it moves none of the first sentence."""
    loaded = load_model("minilm")
    converted = quantized(loaded, recipe)
    of_all = differing_nodes(converted, loaded, loaded.example, tmp_path / "net.onnx")
    of_one = differing_nodes(converted, loaded, [x[:1, :6] for x in loaded.example], tmp_path / "net.onnx")
    assert of_all[:2] == of_one[:2] == (0, 0 if recipe == "mxfp4_weight_only" else 42)
    assert of_one[2] < 1e-4 and of_all[2] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp4_weight_only", "mxfp8"])
def test_resnet50_in_openvino(recipe, tmp_path):
    loaded = load_model("torchvision:resnet50")
    converted = quantized(loaded, recipe)
    different, _, error = differing_nodes(converted, loaded, loaded.example, tmp_path / "net.onnx")
    assert not different and error < (1e-4 if recipe == "mxfp4_weight_only" else 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "recipe"), [("llama", "mxfp4_weight_only"), ("qwen3", "mxfp8"), ("gpt2", "mxfp4")])
def test_the_tokens_of_a_decoder_in_openvino(family, recipe, tmp_path):
    pytest.importorskip("openvino")
    model = decoder_by_recipe(recipe, family, eos_token_id=None, initializer_range=0.2, tie_word_embeddings=False)
    export_onnx(model, tmp_path / "model.onnx", target="openvino")
    check_structure(onnx.load(tmp_path / "model.onnx"))
    runtime, (ids, mask) = load(tmp_path / "model.onnx", "openvino"), padded()
    tokens, _ = greedy(runtime.call, empty_past(model, len(ids)), ids, mask, 16)
    assert torch.equal(tokens, model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False))


def quantized(loaded, recipe):
    return convert_pt2e(prepare_pt2e(export_loaded(loaded).module(), pt2mx.MXQuantizer.from_recipe(recipe)))
