"""Each target: what its text or graph computes is what the converted graph computes, to the bit."""

import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pt2mx
from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config
from pt2mx.fx.targets.parts import identifiers
from pt2mx.fx.targets.table import TARGETS, translate
from tests.documents import ROOT
from tests.flow import convert
from tests.fx.targets import interpreter

#: target -> formats of weights and activations that it has
CONFIGS = {
    "torchao": [("mxfp8", None), ("mxfp8_e5m2", None)],
    "circle": [(f"{name}(floor,half_away)",) * 2 for name in ("mxint8", "mxfp4", "mxfp6_e3m2", "mxfp8")],
    "tosa": [("mxfp4", "mxfp8(rceil)"), ("mxfp6_e2m3", "mxfp6_e3m2(rceil)"), ("mxfp8_e5m2", "mxfp8_e5m2(rceil)")],
    "stablehlo": [("mxfp8", "mxfp8"), ("mxfp4", "mxfp6_e2m3(ceil,half_away)")],
    "tensorrt": [("mxfp8", "mxfp8(rceil)"), ("mxfp4", "mxfp8(rceil)"), ("mxfp4", None)],
}
CASES = [(target, *config) for target, configs in CONFIGS.items() for config in configs]


class Net(nn.Module):
    """Two linear layers and a table; the rest stays as it is."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(10, 64), nn.Linear(64, 96), nn.Linear(96, 5)

    def forward(self, ids):  # (B, T) -> (B, T, 5)
        return self.down(torch.relu(self.up(self.table(ids))))


IDS = torch.tensor([[1, 2, 3], [4, 5, 9]])


def converted(weight, activation=None, model=None, inputs=(IDS,), shapes=None):
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight, activation))
    return convert(Net().eval() if model is None else model, inputs, quantizer, shapes=shapes)


def weight_of(model, name):
    return model.get_buffer(f"{name}_data"), model.get_buffer(f"{name}_scale")


@pytest.mark.parametrize(("target", "weight", "activation"), [c for c in CASES if c[0] in ("torchao", "circle")])
def test_graphs_give_the_bits_of_the_converted_one(target, weight, activation):
    model = converted(weight, activation)
    code = model.code
    translated = translate(model, target)
    called = {str(node.target) for node in translated.graph.nodes if node.op == "call_function"}
    assert not any("pt2mx" in name for name in called) and model.code == code
    assert {f"{name.replace('::', '.')}.default" for name in TARGETS[target].writes} <= called
    with torch.no_grad():
        assert torch.equal(translated(IDS), model(IDS))
        again = torch.export.export(translated, (IDS,)).module()  # the operators have fake kernels
        assert torch.equal(again(IDS), model(IDS))


class Tied(nn.Module):
    """Two linear layers of one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x):  # (B, 64) -> (B, 64)
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize(
    ("activation", "names"),
    [
        ("mxfp8(rceil)", ["second_weight_matmul", "second_weight_matmul1"]),
        (None, ["second_weight_matmul", "second_weight"]),  # the second layer reads the weight alone
    ],
)
def test_each_layer_of_a_shared_weight_has_a_function(activation, names):
    config, x = get_default_mx_quantization_config("mxfp4", "mxfp8(rceil)"), torch.randn(2, 64)
    quantizer = MXQuantizer().set_global(config)
    quantizer.set_module_name("second", get_default_mx_quantization_config("mxfp4", activation))
    text = translate(convert(Tied().eval(), (x,), quantizer), "tosa")
    assert re.findall(r"func\.func @(\w+)", text) == names


#: names of modules of which several give the same letters, or letters that are none in the dialects
HOSTILE = [
    *("a", "a_0", "a-0", "a 0", "a:0", "größe", "gr__e", "gr__e_1", "权重", "__", "0", "_0", "1", "func", "tensor"),
    *("a_0_weight", "b", "b_weight", "b_weight_matmul", "b_weight_codes", "b_weight_scale", "x", "linear", "x" * 200),
]


class Named(nn.Module):
    """Layers whose names are hostile, and layers within a list, one after the other."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(64, 64))
        self.add_module("a", nn.ModuleList(nn.Linear(64, 64) for _ in range(2)))  # a.0, a.1
        self.tables = nn.ModuleDict({"a.0".replace(".", "_"): nn.Embedding(4, 64), "größe": nn.Embedding(4, 64)})

    def forward(self, x):
        for layer in (m for m in self.modules() if isinstance(m, nn.Linear)):
            x = layer(x)
        return x + sum(table.weight.sum() for table in self.tables.values())


@pytest.mark.parametrize("activation", [None, "mxfp8(rceil)"])
def test_names_are_unique_identifiers(activation):
    x = torch.randn(2, 64)
    model = converted("mxfp8", activation, Named(HOSTILE).eval(), (x,))
    layers = len(HOSTILE) + 1  # "a" became a list of two
    for target in ("tosa", "stablehlo"):
        names = re.findall(r"func\.func @(.+?)\(%", translate(model, target))
        assert len(names) == len(set(names)) >= layers
        assert all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) for name in names)
    text = translate(model, "tensorrt")
    inputs = re.findall(r"\] ([^,)]+)[,)]", text.partition(" => ")[0])
    results = [name for line in text.splitlines() if " = " in line for name in line.partition(" = ")[0].split(",")]
    values = [name.strip() for name in (*inputs, *results)]
    assert len(values) == len(set(values)) and all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) for name in values)
    if activation is None:
        assert torch.equal(translate(model, "torchao")(x), model(x))


@pytest.mark.parametrize("seed", range(5))
def test_any_names_become_unique_identifiers(seed):
    draw = random.Random(seed)
    for _ in range(200):
        names = ["".join(draw.choices("aA0_1.-ßあ٣\n ", k=draw.randrange(5))) for _ in range(draw.randrange(30))]
        made = identifiers(dict(enumerate(names)))
        assert [*made] == [*range(len(names))] and len({*made.values()}) == len(made)
        assert all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) for name in made.values())
        assert not names or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", names[0]) or made[0] == names[0]


def test_weights_of_torchao_have_native_dtypes():
    translated = translate(converted("mxfp8_e5m2"), "torchao")
    (node,) = [n for n in translated.graph.nodes if "dequantize_mx" in str(n.target) and "up" in str(n.args[0])]
    qdata, scale, *others = node.args
    stored = [(getattr(translated, n.target).dtype, tuple(getattr(translated, n.target).shape)) for n in (qdata, scale)]
    assert stored == [(torch.float8_e5m2, (96, 64)), (torch.float8_e8m0fnu, (96, 2))]
    assert others == [torch.float8_e5m2, 32, torch.float32]


@pytest.mark.parametrize(("target", "weight", "activation"), [c for c in CASES if c[0] in ("tosa", "stablehlo")])
def test_text_computes_the_layers_of_the_converted_graph(target, weight, activation):
    model = converted(weight, activation)
    text = translate(model, target)
    assert re.findall(r"@(\w+)\(%", text) == ["up_weight_matmul", "down_weight_matmul", "table_weight"]
    batched = (lambda t: t.unsqueeze(0)) if target == "tosa" else (lambda t: t)
    for name, k in (("up.weight", 64), ("down.weight", 96)):
        x = torch.randn(6, k) * 3
        stored, spec = weight_of(model, name), pt2mx.parse(weight)
        codes, scale = interpreter.elements_of(*stored, spec)
        y = interpreter.run(
            text,
            f"{name.replace('.', '_')}_matmul",
            x=batched(x),
            codes=batched(codes),
            scale=batched(scale),
        )
        values = interpreter.dequantized(codes, scale)
        assert torch.equal(y.reshape(6, -1), F.linear(pt2mx.fake_quantize_mx(x, activation), values))
    codes, scale = interpreter.elements_of(*weight_of(model, "table.weight"), pt2mx.parse(weight))
    with torch.no_grad():
        rows = interpreter.run(text, "table_weight", codes=codes, scale=scale)
        assert torch.equal(model(IDS), rest_of(model, rows))


def rest_of(model, rows):
    """The converted model, with another table."""
    table = next(node for node in model.graph.nodes if "embedding" in str(node.target))
    return torch.fx.Interpreter(model).run(IDS, initial_env={table.args[0]: rows})


def test_golden_text_of_tosa():
    model = converted("mxfp4", "mxfp8(rceil)", nn.Linear(64, 8).eval(), (torch.randn(2, 64),))
    assert (
        translate(model, "tosa")
        == """\
func.func @weight_matmul(%x: tensor<1x2x64xf32>, %codes: tensor<1x8x64xf4E2M1FN>, %scale: tensor<1x8x2xf8E8M0FNU>) \
-> tensor<1x2x8xf32> {
  %q:2 = tosa.cast_to_block_scaled %x {block_size = #tosa.block_size<BLOCK_SIZE_32>} : (tensor<1x2x64xf32>) -> \
(tensor<1x2x64xf8E4M3FN>, tensor<1x2x2xf8E8M0FNU>)
  %y = tosa.matmul_t_block_scaled %q#0, %q#1, %codes, %scale {block_size = #tosa.block_size<BLOCK_SIZE_32>} : \
(tensor<1x2x64xf8E4M3FN>, tensor<1x2x2xf8E8M0FNU>, tensor<1x8x64xf4E2M1FN>, tensor<1x8x2xf8E8M0FNU>) -> \
tensor<1x2x8xf32>
  return %y : tensor<1x2x8xf32>
}
"""
    )


def test_dynamic_rows_are_question_marks():
    shapes = ({0: torch.export.Dim("batch")},)
    model = converted("mxfp8", "mxfp8(rceil)", nn.Linear(64, 8).eval(), (torch.randn(4, 64),), shapes)
    assert "-> tensor<1x?x8xf32>" in translate(model, "tosa")
    assert "-> tensor<?x8xf32>" in translate(model, "stablehlo")
    assert "=> (float[N,8] weight_matmul_y)" in translate(model, "tensorrt")


@pytest.mark.parametrize(("weight", "activation"), CONFIGS["tensorrt"])
def test_onnx_parses_the_text_of_tensorrt(weight, activation):
    onnx = pytest.importorskip("onnx")
    parsed = onnx.parser.parse_model(translate(converted(weight, activation), "tensorrt"))
    nodes = [(node.domain, node.op_type) for node in parsed.graph.node]
    by_element = ("", "DequantizeLinear") if weight == "mxfp4" else ("trt", "TRT_MXFP8DequantizeLinear")
    assert nodes.count(("", "MatMul")) == (2 if activation else 0)
    assert nodes.count(("trt", "TRT_MXFP8DynamicQuantize")) == (2 if activation else 0)
    assert nodes.count(by_element) >= 3
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in parsed.graph.input}
    part = "up_weight_matmul" if activation else "up_weight"
    assert shapes[f"{part}_codes"] == [96, 64] and shapes[f"{part}_scale"] == [96, 2]
    kinds = {value.name: value.type.tensor_type.elem_type for value in parsed.graph.input}
    expected = ("FLOAT4E2M1", "FLOAT8E8M0") if weight == "mxfp4" else ("FLOAT8E4M3FN", "UINT8")
    assert [kinds[f"{part}_{end}"] for end in ("codes", "scale")] == [getattr(onnx.TensorProto, k) for k in expected]
    for node in parsed.graph.node:
        attributes = {a.name: a.i for a in node.attribute if a.name != "perm"}
        assert "Linear" not in node.op_type or attributes == {"axis": -1, "block_size": 32, "output_dtype": 1}


@pytest.mark.parametrize(
    ("target", "weight", "activation", "message"),
    [
        ("tosaa", "mxfp8", None, "unknown target 'tosaa': did you mean 'tosa'"),
        ("torchao", "mxfp4", None, "table_weight is in mxfp4.*'torchao' has weights of fp8_e4m3, fp8_e5m2 with E8M0"),
        ("torchao", "mxfp8", "mxfp8", "'torchao' has no operator for activations: quantize weights only"),
        ("tosa", "mxfp8", "mxfp8", r"'tosa' quantizes by scale_mode rceil"),
        ("tosa", "MXFP8[E4M3]{16}", None, "'tosa' has blocks of 32"),
        ("tosa", "nvfp4", None, "with E8M0 scales of one row"),
        ("circle", "mxfp8", "mxfp8", "'circle' quantizes by rounding half_away"),
        ("tensorrt", "mxfp8", "mxfp4(rceil)", "'tensorrt' has activations of fp8_e4m3 with"),
    ],
)
def test_refuses_what_the_dialect_lacks(target, weight, activation, message):
    with pytest.raises(MXError, match=message):
        translate(converted(weight, activation), target)


def test_a_weight_that_circle_would_saturate():
    """240 has the scale 1 by `ceil`; by `floor` it has the scale 1/2, of which 448 is the largest value."""
    linear = nn.Linear(32, 1).eval()
    nn.init.constant_(linear.weight, 240.0)
    message = r"weight does not quantize to itself by Circle's formulas: quantize it with fp8_e4m3\(floor\)"
    with pytest.raises(MXError, match=message):
        translate(converted("mxfp8(ceil)", None, linear, (torch.ones(1, 32),)), "circle")


def test_refuses_other_axes_ragged_blocks_and_other_models():
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(MXError, match="'tosa' has blocks along the last dimension only"):
        translate(converted("mxfp8", None, nn.Conv2d(3, 4, 3).eval(), (x,)), "tosa")
    ragged = converted("mxfp8", None, nn.Linear(40, 8).eval(), (torch.randn(2, 40),))
    with pytest.raises(MXError, match="has whole blocks only, and 40 is no multiple of 32"):
        translate(ragged, "stablehlo")
    with pytest.raises(MXError, match="the model has no quantized tensors"):
        translate(torch.export.export(nn.Linear(40, 8).eval(), (torch.randn(2, 40),)).module(), "tosa")
    with pytest.raises(MXError, match="expected a converted graph module, not Linear"):
        translate(nn.Linear(40, 8), "tosa")


def test_the_page_has_a_row_for_each_target():
    page = (ROOT / "fx/targets/README.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert {*TARGETS} <= {*table}
    for name, row in TARGETS.items():
        assert all(f"`{operator}`" in table[name] for operator in row.writes), name
        assert row.adapter.startswith(f"{name}:") and callable(row.load())
