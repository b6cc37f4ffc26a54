"""Accumulators of a config: the prepared model emulates them, and the converted one gives the same bits."""

import re

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import quantize_pt2e as torchao

import pt2mx
from pt2mx.pt2e.report.report import QuantizationReport
from tests.flow import convert, exported, prepare


class Net(nn.Module):
    """Every operator with an accumulator, behind each other."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.depthwise, self.linear = nn.Conv2d(16, 16, 3, groups=16), nn.Linear(16, 32)
        self.weight, self.bias = nn.Parameter(torch.randn(32, 32) / 5), nn.Parameter(torch.randn(32))

    def forward(self, x):
        x = self.depthwise(self.norm(self.conv(x)).relu()).flatten(2).mT  # (B, positions, 16)
        x = torch.addmm(self.bias, self.linear(x).flatten(0, 1), self.weight).view(x.shape[0], -1, 2, 16)
        x = x.transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(x, x, x)
        return (x @ x.mT).softmax(-1) @ x


NET = (torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)),)
#: operators of `Net` with an accumulator
CALLS = {"convolution": 2, "linear": 1, "matmul": 3, "attention": 1}


def config(accumulator, spec="mxfp8"):
    return pt2mx.get_default_mx_quantization_config(spec, spec, accumulator=accumulator)


def quantizer(accumulator, spec="mxfp8"):
    return pt2mx.MXQuantizer().set_global(config(accumulator, spec))


def calls(model):
    names = [str(node.target) for node in model.graph.nodes]
    return {kind: names.count(f"pt2mx.{kind}_accumulated.default") for kind in CALLS}


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = Net()
    nn.init.uniform_(net.norm.running_var, 0.5, 2)
    return net


@pytest.mark.compiled_except("False-bfloat16", "True-fixed(6,8)", "False-hopper")
@pytest.mark.parametrize("accumulator", ["bfloat16", "fixed(6,8)", "hopper"])
@pytest.mark.parametrize("qat", [False, True])
def test_converted_equals_prepared(net, accumulator, qat):
    graph = exported(net.train(qat), *NET)
    prepared = (pt2mx.prepare_qat_pt2e if qat else pt2mx.prepare_pt2e)(graph, quantizer(accumulator))
    prepared(*NET)
    prepared.eval()
    pt2mx.enable_fake_quant(prepared)
    want, converted = prepared(*NET), pt2mx.convert_pt2e(prepared)
    assert calls(converted) == CALLS and not any("accumulator" in name for name, _ in converted.named_modules())
    assert torch.equal(converted(*NET), want)
    without = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported(net.eval(), *NET), quantizer("float32")))
    assert calls(without) == dict.fromkeys(CALLS, 0)
    torch.testing.assert_close(without(*NET), want, rtol=0, atol=0.2)
    if accumulator != "hopper":  # whose 13 bits can leave all codes of so small a net as they are
        assert not torch.equal(without(*NET), want)


def test_calibration_computes_in_high_precision(net):
    graph = exported(net.eval(), *NET)
    plain, prepared = (pt2mx.prepare_pt2e(graph, quantizer(each)) for each in (None, "bfloat16{1}"))
    assert torch.equal(plain(*NET), prepared(*NET))
    pt2mx.enable_fake_quant(prepared)
    pt2mx.disable_fake_quant(prepared)
    assert torch.equal(plain(*NET), prepared(*NET))


def test_the_report_tells_what_it_costs():
    model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 8))
    x = (torch.randn(64, 256),)
    sqnr = {}
    for accumulator in ("bfloat16{1}", "bfloat16", "hopper"):
        prepared = prepare(model, x, config(accumulator))
        rows = pt2mx.quantization_report(prepared).operators
        spelling = str(pt2mx.parse_accumulator(accumulator))
        assert [row.accumulator for row in rows] == [spelling] * 2
        assert f"sums in {spelling}: SQNR {rows[0].sums_sqnr:.1f}" in rows[0].notes
        converted = pt2mx.quantization_report(pt2mx.convert_pt2e(prepared))
        assert [row.sums_sqnr for row in converted.operators] == [row.sums_sqnr for row in rows]
        y = torch.ops.pt2mx.linear_accumulated(*x, model[0].weight, model[0].bias, accumulator)
        want = model[0](*x)
        by_hand = 10 * torch.log10(want.square().sum() / (y - want).square().sum())
        assert rows[0].sums_sqnr == pytest.approx(by_hand.item(), abs=0.01)
        sqnr[accumulator] = rows[0].sums_sqnr
    assert 25 < sqnr["bfloat16{1}"] < sqnr["bfloat16"] < 60 < sqnr["hopper"]


def test_a_report_is_read_back(tmp_path):
    report = pt2mx.quantization_report(convert(nn.Linear(64, 8), (torch.ones(2, 64),), quantizer("hopper")))
    report.to_json(tmp_path / "report.json")
    assert QuantizationReport.from_json(tmp_path / "report.json").operators[0].accumulator == "hopper(13){32,128}"


def test_training_takes_torchs_gradient():
    x, layer = torch.randn(4, 64), nn.Linear(64, 8)
    gradients = []
    for accumulator in (None, "fixed(1,1)"):
        qat = pt2mx.prepare_qat_pt2e(exported(layer.train(), x), quantizer(accumulator))
        qat(x).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in qat.named_parameters()})
        layer.zero_grad(set_to_none=True)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_tools_that_look_at_operators_find_them():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(), torch.randn(4, 64)
    graph, one = exported(model, x), config("bfloat16{1}")
    prepared = pt2mx.prepare_pt2e(graph, quantizer("bfloat16{1}"))
    prepared(x)
    rows = pt2mx.compare_stages(graph, {"prepared": prepared}, [x]).rows
    assert "aten.linear" in [row.operator for row in rows]
    chosen = pt2mx.sensitivity(graph, [x, 2 * x], {"one": one, "other": config("fixed(6,8)")}, method="gradient")
    assert {row.module for row in chosen.rows} == {"0", "2"}


def test_tensors_passed_by_name():
    class Net(nn.Module):
        def forward(self, x):
            return torch.addmm(mat2=x.mT, mat1=x, input=x[:1, :4]) + nn.functional.linear(x, bias=x[:, 0], weight=x)

    x = torch.randn(4, 64)
    prepared = prepare(Net(), (x,), config("bfloat16{1}"))
    pt2mx.enable_fake_quant(prepared)
    converted = pt2mx.convert_pt2e(prepared)
    assert calls(converted) == dict.fromkeys(CALLS, 0) | {"linear": 1, "matmul": 1}
    assert torch.equal(converted(x), prepared(x))


def test_operators_behind_each_other():
    model, x = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8)), torch.randn(4, 64)
    weights = pt2mx.get_default_mx_quantization_config(weight="mxfp8", accumulator="bfloat16{1}")
    prepared = prepare(model, (x,), weights)
    pt2mx.enable_fake_quant(prepared)
    converted = pt2mx.convert_pt2e(prepared)
    assert calls(converted)["linear"] == 2 and torch.equal(converted(x), prepared(x))


def test_the_flags_are_saved():
    model, x = nn.Linear(64, 8).eval(), torch.randn(2, 64)
    first, second = (pt2mx.prepare_pt2e(exported(model, x), quantizer("bfloat16{1}")) for _ in range(2))
    pt2mx.enable_fake_quant(first)
    first(x)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x)) and not torch.equal(first(x), model(x))


class Others(nn.Module):
    def __init__(self):
        super().__init__()
        self.bilinear, self.up = nn.Bilinear(8, 8, 8), nn.ConvTranspose1d(8, 8, 2)
        self.same, self.table = nn.Conv1d(8, 8, 3, padding="same"), nn.Embedding(4, 8)

    def forward(self, x, ids):
        x = self.same(self.up(self.bilinear(x, x).mT)).mT + self.table(ids)
        return torch.addmm(x[0], x[0], x[1].mT @ x[1], alpha=2), x[0] @ x[0, 0]


def test_a_remark_names_what_keeps_torchs_sums():
    inputs = torch.randn(2, 8, 8), torch.tensor(1)
    prepared = prepare(Others(), inputs, config("hopper"))
    notes = {row.operator: row.notes for row in pt2mx.quantization_report(prepared).operators}
    remark = "sums in float32: pt2mx has no accumulator for this call"
    without = {name for name, note in notes.items() if remark in note}
    assert without >= {"aten.bilinear", "aten.conv_transpose1d", "aten.conv1d.padding", "aten.addmm"}
    assert remark not in notes["aten.embedding"]


class Dropout(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)


@pytest.mark.parametrize("prepare_pt2e", [pt2mx.prepare_qat_pt2e, pt2mx.prepare_pt2e])
@pytest.mark.filterwarnings("ignore:the exported model runs")
def test_attention_with_dropout_keeps_torchs_sums(prepare_pt2e):
    x = torch.randn(2, 16, 32)
    prepared = prepare_pt2e(exported(Dropout().train(), x), quantizer("bfloat16{1}")).eval()
    prepared(x)
    pt2mx.enable_fake_quant(prepared)
    converted = pt2mx.convert_pt2e(prepared)
    assert calls(converted)["attention"] == 0 and torch.equal(converted(x), prepared(x))
    for model in (prepared, converted):
        (row,) = pt2mx.quantization_report(model).operators
        assert row.remark == "sums in float32: pt2mx has no accumulator for this call"


def test_recipes_and_dictionaries_hold_it(tmp_path):
    one = quantizer("fixed(8,16)")
    text = one.to_recipe(tmp_path / "recipe.yaml")
    assert "accumulator: fixed(8,16){32,row}" in text
    for other in (pt2mx.MXQuantizer.from_recipe(tmp_path / "recipe.yaml"), pt2mx.MXQuantizer.from_dict(one.to_dict())):
        assert other.to_dict() == one.to_dict()
    (tmp_path / "bad.yaml").write_text("global: {weight: mxfp8, accumulator: int32}")
    with pytest.raises(pt2mx.MXError, match=re.escape("global: unknown accumulator 'int32'")):
        pt2mx.MXQuantizer.from_recipe(tmp_path / "bad.yaml")


def test_it_is_exported_again_with_other_lengths_and_lowered():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(4, 64)
    converted = convert(model, (x,), quantizer("hopper"), shapes=({0: torch.export.Dim("batch", min=2, max=64)},))
    again = torch.export.export(converted, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},))
    y = torch.randn(9, 64)
    assert torch.equal(again.module()(y), converted(y))
    lowered = pt2mx.lower_to_inductor(converted)
    assert calls(lowered)["linear"] == 2 and torch.equal(lowered(y), converted(y))


@pytest.mark.parametrize("write", [pt2mx.make_portable, pt2mx.lower_to_aten, pt2mx.export_onnx])
def test_programs_without_pt2mx_have_none(write, tmp_path):
    program = torch.export.export(
        convert(nn.Linear(64, 8), (torch.randn(4, 64),), quantizer("hopper")), (torch.ones(4, 64),)
    )
    with pytest.raises(
        pt2mx.MXError, match=r"adds its products in hopper\(13\)\{32,128\}, and .* have no accumulators"
    ):
        write(program, *([tmp_path / "model.onnx"] if write is pt2mx.export_onnx else []))


def test_torchaos_own_functions():
    """Its prepare inserts no accumulators, and its convert would leave them out."""
    model, x = nn.Linear(64, 8).eval(), torch.randn(4, 64)
    for prepare_pt2e in (pt2mx.prepare_pt2e, torchao.prepare_pt2e):
        prepared = prepare_pt2e(exported(model, x), quantizer("hopper"))
        assert calls(pt2mx.convert_pt2e(prepared))["linear"] == 1
        with pytest.raises(pt2mx.MXError, match=r"accumulator='hopper\(13\)\{32,128\}', which torchao's convert_pt2e"):
            torchao.convert_pt2e(prepared)


def test_gradients_in_a_format_are_refused():
    with pytest.raises(pt2mx.MXError, match="pass one of the two"):
        pt2mx.MXQuantizationConfig(weight="mxfp4", gradient="mxfp8", accumulator="hopper")


def test_half_precision_models():
    model, x = nn.Linear(64, 8).bfloat16().eval(), torch.randn(4, 64, dtype=torch.bfloat16)
    prepared = prepare(model, (x,), config("fixed(4,4)"))
    pt2mx.enable_fake_quant(prepared)
    converted = pt2mx.convert_pt2e(prepared)
    assert converted(x).dtype == torch.bfloat16 and torch.equal(converted(x), prepared(x))
