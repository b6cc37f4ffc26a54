"""The target "standard", in onnx's reference evaluator."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import pt2mx
from pt2mx import MXError, MXSpec, export_onnx, quantize_onnx
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.modes import SCALE_MODES
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX
from pt2mx.pt2e.onnx.standard import to_standard
from tests.compare import same
from tests.float_scale_models import IDS, Net, quantized
from tests.onnx_float_files import old_network, recurrent_network
from tests.onnx_nodes import differences, run
from tests.oracle import modes_of
from tests.random_values import random_values

NATIVE = ("fp4_e2m1", "fp8_e4m3", "fp8_e5m2", "int8", "int8_full")
NATIVE_MODES = [(name, mode) for name in NATIVE for mode in modes_of(name) if not SCALE_MODES[mode].searches]
SHAPES = [((6, 70), -1), ((2, 45, 3), 1), ((33, 4), 0)]


def model_of(nodes, inputs, y, constants=None, opset=24):
    initializers = [numpy_helper.from_array(v.numpy(), name) for name, v in (constants or {}).items()]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("pt2mx", 1)]
    graph = helper.make_graph(nodes, "net", inputs, [y], initializers)
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def value(name, shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def evaluated(model, **inputs):
    onnx.checker.check_model(model, full_check=True)
    with np.errstate(all="ignore"):
        (y,) = ReferenceEvaluator(model).run(None, inputs)
    return torch.from_numpy(np.array(y, np.float32))


def adversarial(shape):
    return torch.cat([random_values(shape, torch.float32, kind) for kind in range(5)])


@pytest.mark.diagonal
@pytest.mark.parametrize(("element", "mode"), NATIVE_MODES)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_activations(element, mode, shape, axis):
    x = torch.cat([adversarial(shape) for _ in range(4)])
    node = FakeQuantizeMX(MXSpec(element, axis=axis, scale_mode=mode)).make(["x"], "y", "fq")
    model = to_standard(model_of([node], [value("x", [None, *x.shape[1:]])], value("y", [None] * x.dim()), opset=20))
    kinds = [node.op_type.partition(".")[0] for node in model.graph.node]
    symmetric = element == "int8"
    assert kinds == (["FakeQuantizeMX"] if symmetric else ["ScaleMX", "QuantizeLinear", "DequantizeLinear"])
    want = pt2mx.fake_quantize_mx(x, MXSpec(element, 32, axis, scale_mode=mode))
    assert same(evaluated(model, x=x.numpy()), want)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("element", NATIVE)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_weights(element, dtype, shape, axis):
    x, kind = adversarial(shape), {"float32": 1, "float16": 10, "bfloat16": 16}[dtype]
    spec = MXSpec(element, 32, axis)
    scale, codes = pt2mx.quantize_mx(x, spec)
    node = DequantizeMX(MXSpec(element, axis=axis), x.shape[axis], kind).make(["c", "s"], "y", "dq")
    model = to_standard(model_of([node], [], value("y", x.shape, kind), {"c": codes, "s": scale}))
    native = {tensor.name: tensor for tensor in model.graph.initializer}
    assert sorted(native) == ["c_native", "s_native"] and not model.functions
    assert tuple(native["c_native"].dims) == tuple(x.shape) and tuple(native["s_native"].dims) == tuple(scale.shape)
    want = pt2mx.dequantize_mx(codes, scale, spec, target_dtype=getattr(torch, dtype), length=x.shape[axis])
    assert same(evaluated(model), want.float())
    if not spec.element.is_int:
        assert native["s_native"].data_type == TensorProto.FLOAT8E8M0
        assert native["s_native"].raw_data == scale.numpy().tobytes()


def test_fp4_has_the_bytes_that_pt2mx_stores():
    scale, codes = pt2mx.quantize_mx(torch.randn(6, 64), "mxfp4")
    node = DequantizeMX(MXSpec("fp4_e2m1"), 64).make(["c", "s"], "y", "dq")
    model = to_standard(model_of([node], [], value("y", [6, 64]), {"c": codes, "s": scale}))
    (stored,) = (tensor for tensor in model.graph.initializer if tensor.name == "c_native")
    assert stored.data_type == TensorProto.FLOAT4E2M1 and stored.raw_data == codes.numpy().tobytes()


def test_constants_are_shared_among_nodes_of_equal_attributes():
    """Exporters merge equal constants: nodes share codes and scales in any combination, and decode them in two ways."""
    x = torch.stack([adversarial((6, 64)), adversarial((6, 64))])
    (c, s), (d, t) = (pt2mx.quantize_mx(one, "mxfp8")[::-1] for one in x)
    decoded = [("c", "s", "fp8_e4m3"), ("d", "s", "fp8_e4m3"), ("c", "t", "fp8_e4m3"),
             ("c", "s", "fp8_e5m2"), ("d", "s", "int8"), ("c", "t", "int8_full")]  # fmt: skip
    nodes, want, constants = [], [], {"c": c, "d": d, "s": s, "t": t}
    for i, (codes, scale, element) in enumerate(decoded):
        nodes.append(DequantizeMX(MXSpec(element), 64).make([codes, scale], f"y{i}", f"dq{i}"))
        want.append(pt2mx.dequantize_mx(constants[codes], constants[scale], MXSpec(element, 32)))
    outputs = [node.output[0] for node in nodes]
    nodes.append(helper.make_node("Concat", [*outputs, "c_native"], ["y"], "all", axis=-1))  # the name is in use
    model = to_standard(model_of(nodes, [value("c_native", [30, 1])], value("y", [30, None]), constants))
    names = [tensor.name for tensor in model.graph.initializer]
    assert len(names) == len(set(names)) == 5 + 4  # c as three elements, d as two; s and t as E8M0 and as floats
    native = torch.ones(30, 1)
    assert same(evaluated(model, c_native=native.numpy()), torch.cat([*want, native], -1))


def test_names_of_activations_are_fresh():
    used = [helper.make_node("Neg", ["x"], [f"q_{name}"], name) for name in ("scale", "codes")]
    total = helper.make_node("Sum", ["q", "q_scale", "q_codes"], ["y"], "sum")
    nodes = [*used, FakeQuantizeMX(MXSpec("fp8_e4m3"), 70).make(["x"], "q", "fq"), total]
    model = to_standard(model_of(nodes, [value("x", [6, 70])], value("y", [6, 70])))
    x = torch.randn(6, 70)
    want = pt2mx.fake_quantize_mx(x, "mxfp8") - x - x
    assert torch.allclose(evaluated(model, x=x.numpy()), want)


def test_rows_of_an_embedding_are_gathered_from_values():
    x = torch.randn(20, 40)
    scale, codes = pt2mx.quantize_mx(x, "mxfp8")
    nodes = [
        helper.make_node("Gather", ["c", "ids"], ["rows"], "codes"),
        helper.make_node("Gather", ["s", "ids"], ["scales"], "scales"),
        DequantizeMX(MXSpec("fp8_e4m3"), 40).make(["rows", "scales"], "y", "dq"),
    ]
    inputs = [value("ids", [None, 3], TensorProto.INT64)]
    model = to_standard(model_of(nodes, inputs, value("y", [None, 3, 40]), {"c": codes, "s": scale}))
    assert [node.op_type for node in model.graph.node] == ["DequantizeLinear", "Gather"]
    ids = np.random.randint(0, 20, (2, 3))
    assert same(evaluated(model, ids=ids), pt2mx.fake_quantize_mx(x, "mxfp8")[torch.from_numpy(ids)])


@pytest.mark.parametrize(
    ("fake", "shape"),
    [
        (FakeQuantizeMX(MXSpec("fp6_e3m2")), [None, 40]),
        (FakeQuantizeMX(MXSpec("fp4_e2m1", rounding="half_away")), [None, 40]),
        (FakeQuantizeMX(MXSpec("int8")), [None, 40]),
        (FakeQuantizeMX(MXSpec("fp8_e5m2")), [40]),
    ],
)
def test_nodes_without_an_equivalent_keep_their_function(fake, shape):
    model = to_standard(model_of([fake.make(["x"], "y", "fq")], [value("x", shape)], value("y", shape)))
    assert [node.op_type.partition(".")[0] for node in model.graph.node] == ["FakeQuantizeMX"]
    x = torch.randn(40) if len(shape) == 1 else torch.randn(5, 40)
    assert same(evaluated(model, x=x.numpy()), pt2mx.fake_quantize_mx(x, fake.spec))


@pytest.mark.parametrize(("network", "x"), [
    (lambda: old_network(18, 10), {"x": np.float32(np.random.RandomState(0).randn(2, 3, 8, 8))}),
    (recurrent_network, {"ids": np.random.RandomState(0).randint(0, 70, (5, 3))}),
])  # fmt: skip
def test_a_file_of_the_target_gives_the_outputs_of_the_file_of_functions(tmp_path, network, x):
    onnx.save(network(), tmp_path / "float.onnx")
    outputs = []
    for target in ("pt2mx", "standard"):
        quantize_onnx(tmp_path / "float.onnx", tmp_path / "mx.onnx", "mxfp8", target=target)
        outputs.append(evaluated(onnx.load(tmp_path / "mx.onnx"), **x))
    assert torch.allclose(*outputs, rtol=0, atol=1e-6)
    nodes = {node.domain for node in onnx.load(tmp_path / "mx.onnx").graph.node if "Scale" not in node.op_type}
    assert nodes == {""}


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_activations_of_other_types_are_cast(kind):
    dtype = {TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16}[kind]
    x = adversarial((6, 70)).to(dtype)
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], "", to=kind),
        FakeQuantizeMX(MXSpec("fp8_e4m3")).make(["h"], "q", "fq"),
        helper.make_node("Cast", ["q"], ["y"], "", to=TensorProto.FLOAT),
    ]
    model = to_standard(model_of(nodes, [value("x", [None, 70])], value("y", [None, 70])))
    kinds = [node.op_type.partition(".")[0] for node in model.graph.node]
    assert kinds == ["Cast", "Cast", "ScaleMX", "QuantizeLinear", "DequantizeLinear", "CastLike", "Cast"]
    assert same(evaluated(model, x=x.float().numpy()), pt2mx.fake_quantize_mx(x, "mxfp8").float())


def test_an_exported_program(tmp_path):
    """Activations and weights, of equal scales, are standard nodes; the output equals the output of the converted
    model."""
    model, x = torch.nn.Sequential(torch.nn.Linear(70, 70), torch.nn.Linear(70, 70)).eval(), torch.randn(3, 70)
    model[1].weight.data = -model[0].weight.data
    prepared = pt2mx.prepare_pt2e(torch.export.export(model, (x,)).module(), pt2mx.MXQuantizer.from_recipe("mxfp4"))
    converted = pt2mx.convert_pt2e(prepared)
    export_onnx(converted, tmp_path / "net.onnx", (x,), target="standard")
    model = onnx.load(tmp_path / "net.onnx")
    kinds = sorted(node.op_type.partition(".")[0] for node in model.graph.node)
    assert kinds == sorted(2 * ["DequantizeLinear", "DequantizeLinear", "Gemm", "QuantizeLinear", "ScaleMX"])
    assert len({node.input[1] for node in model.graph.node if node.input[0].endswith("data_native")}) == 1
    assert torch.allclose(evaluated(model, input=x.numpy()), converted(x), atol=1e-6)


@pytest.mark.parametrize("name", ["nvfp4", "fp4_e2m1{16}(e4m3_f32_divisor)", "fp8_e4m3{16}(f32)", "fp8_e4m3{16}(e5m3)"])
@pytest.mark.parametrize("static", [False, True])
def test_scales_with_a_significand(name, static):
    spec, x, w = pt2mx.parse(name), torch.randn(6, 70), torch.randn(5, 70)
    t = {"t": pt2mx.tensor_scale_mx(w, spec)} if spec.scale_format.tensor else {}
    scale, codes = pt2mx.quantize_mx(w, spec, tensor_scale=t.get("t"))
    dequantize = DequantizeMX(spec, 70).make(["c", "s", *t], "w", "dq")
    fake = FakeQuantizeMX(spec, 70).make(["x", *(t if static else {})], "q", "fq")
    nodes = [dequantize, fake, helper.make_node("Einsum", ["q", "w"], ["y"], equation="mk,nk->mnk")]
    model = to_standard(model_of(nodes, [value("x", [6, 70])], value("y", [6, 5, 70]), {"c": codes, "s": scale, **t}))
    steps = {"": [], "factor": ["DequantizeLinear"], "divisor": ["Cast", "Div"]}[spec.scale_format.tensor]
    kinds = [node.op_type.partition(".")[0] for node in model.graph.node]
    assert kinds == [*steps, "DequantizeLinear", "ScaleMX", "QuantizeLinear", "DequantizeLinear", "Einsum"]
    if spec.scale_format.tensor:
        native = {tensor.name: tensor for tensor in model.graph.initializer}["s_native"]
        assert native.data_type == TensorProto.FLOAT8E4M3FN and native.raw_data == scale.numpy().tobytes()
    q = pt2mx.fake_quantize_mx(x, spec, tensor_scale=t.get("t") if static else None)
    values = pt2mx.dequantize_mx(codes, scale, spec, length=70, tensor_scale=t.get("t"))
    assert same(evaluated(model, x=x.numpy()), q[:, None] * values)


@pytest.mark.compiled
@pytest.mark.slow_except("nvfp4")
@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3{16x32}(f32)"])
def test_an_exported_program_with_scales_of_a_significand(name, tmp_path):
    """The file of functions runs in onnxruntime, and the target's in the evaluator."""
    torch.manual_seed(0)
    converted = fold_all_weights(quantized(Net().eval(), IDS, name=name))
    with torch.no_grad():
        want = converted(IDS)
    export_onnx(converted, tmp_path / "functions.onnx", (IDS,))
    assert not any(differences(onnx.load(tmp_path / "functions.onnx"), {"ids": IDS.numpy()}).values())
    for got, y in zip(run(str(tmp_path / "functions.onnx"), IDS), want, strict=True):
        torch.testing.assert_close(got, y, rtol=1e-4, atol=1e-5)
    export_onnx(converted, tmp_path / "standard.onnx", (IDS,), target="standard")
    for got, y in zip(
        ReferenceEvaluator(str(tmp_path / "standard.onnx")).run(None, {"ids": IDS.numpy()}), want, strict=True
    ):
        torch.testing.assert_close(torch.from_numpy(got), y, rtol=1e-4, atol=1e-5)
    with pytest.raises(MXError, match="Quark has no node of"):
        export_onnx(converted, tmp_path / "quark.onnx", (IDS,), target="quark")
