"""Each target: its graph computes what the converted graph computes, to the bit."""

import re

import pytest
import torch
from torch import nn

from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config
from pt2mx.fx.targets.table import TARGETS, translate
from tests.documents import ROOT
from tests.flow import convert
from tests.models import chain
from tests.subgraph_models import Cond, X

#: target -> formats of weights and activations that it has
CONFIGS = {
    "torchao": [("mxfp8", None), ("mxfp8_e5m2", None)],
    "circle": [(f"{name}(floor,half_away)",) * 2 for name in ("mxint8", "mxfp4", "mxfp6_e3m2", "mxfp8")],
}
CASES = [(target, *config) for target, configs in CONFIGS.items() for config in configs]
#: target -> the operators that it writes
OPERATORS = {
    "torchao": {"torchao.dequantize_mx.default"},
    "circle": {"circle_custom.quantize_mx.default", "circle_custom.dequantize_mx.default"},
}


def net():  # (B, T) -> (B, T, 5)
    """Two linear layers and a table; the rest stays as it is."""
    return chain(table=nn.Embedding(10, 64), up=nn.Linear(64, 96), relu=nn.ReLU(), down=nn.Linear(96, 5))


IDS = torch.tensor([[1, 2, 3], [4, 5, 9]])


def converted(weight, activation=None, model=None, inputs=(IDS,), shapes=None):
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight, activation))
    return convert(net().eval() if model is None else model, inputs, quantizer, shapes=shapes)


@pytest.mark.parametrize(("target", "weight", "activation"), CASES)
def test_graphs_give_the_bits_of_the_converted_one(target, weight, activation):
    model = converted(weight, activation)
    code = model.code
    translated = translate(model, target)
    called = {str(node.target) for node in translated.graph.nodes if node.op == "call_function"}
    assert not any("pt2mx" in name for name in called) and model.code == code
    assert OPERATORS[target] <= called
    with torch.no_grad():
        assert torch.equal(translated(IDS), model(IDS))
        again = torch.export.export(translated, (IDS,)).module()  # the operators have fake kernels
        assert torch.equal(again(IDS), model(IDS))


#: names of modules of which several give the same letters, or letters that are none in other languages
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


def test_names_of_any_letters():
    x = torch.randn(2, 64)
    for target, weight in (("torchao", "mxfp8"), ("circle", "mxfp8(floor,half_away)")):
        model = converted(weight, None, Named(HOSTILE).eval(), (x,))
        assert torch.equal(translate(model, target)(x), model(x))


def test_weights_of_torchao_have_native_dtypes():
    translated = translate(converted("mxfp8_e5m2"), "torchao")
    (node,) = [n for n in translated.graph.nodes if "dequantize_mx" in str(n.target) and "up" in str(n.args[0])]
    qdata, scale, *others = node.args
    buffers = [translated.get_buffer(node.target) for node in (qdata, scale)]
    stored = [(buffer.dtype, tuple(buffer.shape)) for buffer in buffers]
    assert stored == [(torch.float8_e5m2, (96, 64)), (torch.float8_e8m0fnu, (96, 2))]
    assert others == [torch.float8_e5m2, 32, torch.float32]


@pytest.mark.parametrize(
    ("target", "weight", "activation", "message"),
    [
        ("circel", "mxfp8", None, "unknown target 'circel': did you mean 'circle'"),
        ("torchao", "mxfp4", None, "table.weight is in mxfp4.*'torchao' has weights of fp8_e4m3, fp8_e5m2 with E8M0"),
        ("torchao", "mxfp8", "mxfp8", "'torchao' has no operator for activations: quantize weights only"),
        ("circle", "MXFP8[E4M3]{16}", None, "'circle' has blocks of 32"),
        ("circle", "nvfp4", None, "with E8M0 scales of one row"),
        ("circle", "mxfp8", "mxfp8", "'circle' quantizes by rounding half_away"),
        ("circle", "mxfp8", "mxfp8(ceil,half_away)", "'circle' quantizes by scale_mode floor"),
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
    with pytest.raises(MXError, match="'torchao' has blocks along the last dimension only"):
        translate(converted("mxfp8", None, nn.Conv2d(3, 4, 3).eval(), (x,)), "torchao")
    ragged = converted("mxfp8", None, nn.Linear(40, 8).eval(), (torch.randn(2, 40),))
    with pytest.raises(MXError, match="has whole blocks only, and 40 is no multiple of 32"):
        translate(ragged, "torchao")
    with pytest.raises(MXError, match="the model has no quantized tensors"):
        translate(torch.export.export(nn.Linear(40, 8).eval(), (torch.randn(2, 40),)).module(), "circle")
    with pytest.raises(MXError, match="expected a converted graph module, not Linear"):
        translate(nn.Linear(40, 8), "circle")


def test_refuses_quantized_tensors_in_subgraphs():
    model = converted("mxfp8", None, Cond().eval(), (X,))
    with pytest.raises(MXError, match=r"of 'inner' is in a subgraph .*: leave the module in float"):
        translate(model, "torchao")


def test_the_page_has_a_row_for_each_target():
    page = (ROOT / "fx/targets/README.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert {*TARGETS} <= {*table}
