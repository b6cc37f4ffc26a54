import importlib.util
import json
import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXFormatObserver, MXQuantizationConfig, MXQuantizer, lower_to_inductor, quantization_report
from pt2mx.analysis.sums import QuantizationStatistics, quantization_sums
from pt2mx.pt2e.report.report import COLUMNS, QuantizationReport
from pt2mx.pt2e.report.rows import OperatorReport
from tests.flow import calibrated, convert, exported, prepare, reloaded, train
from tests.models import IMAGES, NormalizedConv, chain, exported_conv, tied
from tests.reports import operator, report_of
from tests.subgraph_models import Branches

CONFIG = MXQuantizationConfig(weight="mxfp4", activation="mxfp8")


def models():
    quantizer = MXQuantizer().set_global(CONFIG).set_module_name("conv", None)
    prepared = calibrated(exported_conv(), quantizer, *IMAGES)
    return prepared, pt2mx.convert_pt2e(prepared)


@pytest.mark.parametrize("which", ["prepared", "converted"])
def test_every_operator_its_specs_statistics_bytes_and_reasons(which):
    report = quantization_report(models()[which == "converted"])
    conv, linear = report.operators
    assert (conv.module, conv.operator, conv.quantized) == ("conv", "aten.conv2d", False)
    assert conv.reason == "excluded by module_name 'conv'"
    assert [(o.role, o.spec, o.bytes_before, o.bytes_after) for o in linear.operands] == [
        ("activation", "mxfp8_e4m3{32}", 0, 0),
        ("weight", "mxfp4_e2m1{32}", 4 * 8 * 4, 4 * (4 + 1)),
        ("bias", None, 16, 16),
    ]
    assert linear.reason is None and linear.quantized
    weight = exported_conv().get_parameter("fc.weight")
    assert isinstance(linear.operands[1].statistics, QuantizationStatistics)
    assert linear.operands[1].statistics.values == weight.numel() == 32
    assert linear.operands[0].statistics.values == 2 * 8


def test_prepared_and_converted_reports_agree():
    prepared, converted = (quantization_report(m) for m in models())
    assert prepared.operators == converted.operators
    assert (prepared.values, prepared.bytes_before, prepared.bytes_after) == (
        converted.values, converted.bytes_before, converted.bytes_after,
    )  # fmt: skip
    saved = sum(t.nbytes for t in models()[1].state_dict().values())
    assert converted.bytes_after == saved
    assert converted.effective_bits == 8 * saved / converted.values


def test_statistics_are_those_of_the_tensor():
    torch.manual_seed(0)
    layer, inputs = nn.Linear(64, 8).eval(), (torch.randn(4, 64),)
    prepared = pt2mx.prepare_pt2e(torch.export.export(layer, inputs).module(), MXQuantizer().set_global(CONFIG))
    prepared(*inputs)
    operands = quantization_report(pt2mx.convert_pt2e(prepared)).operators[0].operands
    for operand, tensor, spec in zip(operands, (inputs[0], layer.weight), ("mxfp8", "mxfp4"), strict=False):
        sums = quantization_sums(tensor.detach(), pt2mx.parse(spec))
        assert operand.statistics == QuantizationStatistics.from_sums(sums)


def test_a_re_exported_model_still_tells_its_specs():
    _, converted = models()
    again = torch.export.export(converted, IMAGES).module()
    linear = quantization_report(again).operators[1]
    assert [o.spec for o in linear.operands] == ["mxfp8_e4m3{32}", "mxfp4_e2m1{32}", None]
    assert linear.operands[0].statistics is None
    assert quantization_report(again).effective_bits == quantization_report(converted).effective_bits


def test_shared_weights_are_counted_once():
    inputs = (torch.tensor([[1, 2]]),)
    model = tied(chain(embedding=nn.Embedding(16, 32), head=nn.Linear(32, 16, bias=False)), "embedding", "head")
    model = torch.export.export(model.eval(), inputs).module()
    prepared = pt2mx.prepare_pt2e(model, MXQuantizer().set_global(CONFIG))
    for report in (quantization_report(prepared), quantization_report(pt2mx.convert_pt2e(prepared))):
        assert (report.bytes_before, report.bytes_after, report.values) == (16 * 32 * 4, 16 * 17, 16 * 32)


def test_ratios_that_are_not_finite_are_null_in_json():
    prepared = pt2mx.prepare_pt2e(exported_conv(), MXQuantizer().set_global(CONFIG))
    prepared(torch.zeros(2, 3, 8, 8))
    report = quantization_report(prepared)
    assert report.operators[0].operands[0].statistics.sqnr == float("inf")
    assert json.loads(report.to_json())["operators"][0]["operands"][0]["statistics"]["sqnr"] is None
    assert report.to_table().splitlines()[-2].startswith("SQNR inf: the format holds each value exactly")


def test_table_and_json(tmp_path):
    report = quantization_report(models()[1])
    lines = report.to_table().splitlines()
    assert lines[0].split() == [
        "module",
        "operator",
        "activation",
        "weight",
        "SQNR",
        "a",
        "SQNR",
        "w",
        "bytes",
        "after",
    ]
    assert lines[1].startswith("conv") and lines[1].endswith("excluded by module_name 'conv'")
    assert lines[2].split()[:4] == ["fc", "aten.linear", "mxfp8_e4m3{32}", "mxfp4_e2m1{32}"]
    assert lines[-1].startswith("1 of 2 operators quantized; parameters ")
    read = json.loads(report.to_json(tmp_path / "r.json"))
    assert read == json.loads((tmp_path / "r.json").read_text())
    assert read["effective_bits"] == report.effective_bits
    assert read["operators"][1]["operands"][1]["spec"] == "mxfp4_e2m1{32}"


@pytest.mark.parametrize("model", [None, NormalizedConv()])
def test_other_objects_are_refused(model):
    with pytest.raises(MXError, match="expected a prepared or converted graph module"):
        quantization_report(model)


def test_a_program_is_reported_as_its_module():
    _, converted = models()
    report = quantization_report(torch.export.export(converted, IMAGES))
    assert report.operators and report.bytes_after == quantization_report(converted).bytes_after
    specs = [[operand.spec for operand in row.operands] for row in quantization_report(converted).operators]
    assert [[operand.spec for operand in row.operands] for row in report.operators] == specs


def test_bits_of_the_weights_alone():
    prepared, converted = models()
    assert quantization_report(prepared).weight_bits == quantization_report(converted).weight_bits == 8 * 5 / 8


def test_columns_without_sqnr_say_why():
    x = torch.ones(2, 64)
    prepared = pt2mx.prepare_pt2e(exported(Branches().eval(), x), MXQuantizer().set_global(CONFIG))
    converted = pt2mx.convert_pt2e(prepared)
    untouched = quantization_report(converted)
    assert untouched.summary.endswith("; no SQNR of activations: it holds no statistics of a calibration")
    assert str(untouched) == untouched.to_table() and str(untouched).endswith(untouched.summary)
    assert "no SQNR of activations" in untouched.to_html()
    assert "did not reach" not in untouched.to_table()
    again = quantization_report(reloaded(torch.export.export(converted, (x,))).module())
    assert again.summary.endswith("; no SQNR: it holds no statistics of a calibration")
    with torch.no_grad():
        prepared(x)
    report = quantization_report(pt2mx.convert_pt2e(prepared))
    assert "no SQNR" not in report.summary
    one, other = report.to_table().splitlines()[1:3]
    assert "no SQNR" not in one
    assert other.endswith("activation: no SQNR, calibration did not reach it")


def sqnr(report, role):
    return [o.statistics and o.statistics.sqnr for op in report.operators for o in op.operands if o.role == role]


def test_weights_have_their_sqnr_without_a_calibration():
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).eval()
    graph, weight_only = exported(model, x), MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4"))
    want = [
        pytest.approx(
            QuantizationStatistics.from_sums(quantization_sums(layer.weight.detach(), pt2mx.parse("mxfp4"))).sqnr,
            abs=1e-3,
        )
        for layer in model
    ]
    prepared = pt2mx.prepare_pt2e(graph, weight_only)
    for uncalibrated in (prepared, pt2mx.convert_pt2e(prepared), pt2mx.convert_pt2e(prepared, fold_quantize=False)):
        report = quantization_report(uncalibrated)
        assert sqnr(report, "weight") == want and "no SQNR" not in report.to_table()
        assert "NaN" not in report.to_json() and not any(o.notes for o in report.operators)
    assert all(m.statistics is None for m in prepared.modules() if isinstance(m, pt2mx.MXObserver))  # unchanged
    config = MXQuantizationConfig(weight="mxfp4", observer=MXFormatObserver.with_args(candidates=("mxfp4", "mxint8")))
    candidates = quantization_report(pt2mx.prepare_pt2e(graph, MXQuantizer().set_global(config)))
    assert [o.candidates["mxfp4_e2m1{32}"].sqnr for op in candidates.operators for o in op.operands[1:2]] == want


def test_conversion_counts_no_saturated_weights(monkeypatch):
    """Shares and exponents without calibration would take longer than the conversion itself."""

    def refuse(x, spec):
        raise AssertionError("a conversion without a calibration computes the noise alone")

    monkeypatch.setattr("pt2mx.analysis.sums.quantization_sums", refuse)
    prepared = pt2mx.prepare_pt2e(
        exported(nn.Linear(64, 8).eval(), torch.randn(4, 64)), MXQuantizer().set_global(CONFIG)
    )
    weight = quantization_report(pt2mx.convert_pt2e(prepared)).operators[0].operands[1]
    assert weight.statistics.sqnr > 15 and math.isnan(weight.statistics.saturated)


def test_statistics_without_counts_come_back_from_json(tmp_path):
    prepared = pt2mx.prepare_pt2e(
        exported(nn.Linear(64, 8).eval(), torch.randn(4, 64)), MXQuantizer().set_global(CONFIG)
    )
    report = quantization_report(prepared)
    report.to_json(tmp_path / "report.json")
    assert QuantizationReport.from_json(tmp_path / "report.json") == report


def test_weights_have_the_sqnr_that_training_left():
    torch.manual_seed(0)
    x = torch.randn(8, 32, 4, 4)
    model = nn.Sequential(nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1)).train()
    qat = pt2mx.prepare_qat_pt2e(exported(model, x), MXQuantizer().set_global(CONFIG))
    pt2mx.enable_observer(qat)  # sees the weights of the first step
    train(qat, x, steps=2, lr=0.1)
    qat.eval()
    prepared, converted = quantization_report(qat), quantization_report(pt2mx.convert_pt2e(qat))
    with torch.no_grad():
        norm, last = qat.get_submodule("1"), qat.get_parameter("3.weight")
        scale = norm.weight * (norm.running_var + 1e-5).rsqrt()
        weights = (qat.get_parameter("0.weight") * scale.reshape(-1, 1, 1, 1), last)
        sums = [quantization_sums(weight, pt2mx.parse("mxfp4", axis=1)) for weight in weights]
    want = [pytest.approx(QuantizationStatistics.from_sums(actual).sqnr, abs=1e-3) for actual in sums]
    assert sqnr(prepared, "weight") == sqnr(converted, "weight") == want
    assert None not in sqnr(converted, "activation")


def observed():
    config = MXQuantizationConfig(
        weight="mxfp8", activation="mxfp8", observer=MXFormatObserver.with_args(candidates=("mxfp4", "mxint8"))
    )
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    return prepare(model, (torch.randn(4, 64),), config)


def test_candidates_in_table_and_json():
    prepared = observed()
    for model in (prepared, pt2mx.convert_pt2e(prepared)):
        report = quantization_report(model)
        lines = [line.split() for line in report.to_table(candidates=True).splitlines()]
        assert lines[0][-2:] == ["mxfp4_e2m1{32}", "mxint8{32}"] and len(lines) == 5
        assert lines[1][:4] == ["0", "aten.linear", "activation", "mxfp8_e4m3{32}"]
        weight = report.operators[0].operands[1]
        assert lines[2][-2:] == [f"{seen.sqnr:.1f}" for seen in weight.candidates.values()]
        read = json.loads(report.to_json())["operators"][0]["operands"][1]["candidates"]
        assert read["mxint8{32}"]["sqnr"] == weight.candidates["mxint8{32}"].sqnr
    with pytest.raises(MXError, match="no candidates were observed: prepare with observer=MXFormatObserver"):
        quantization_report(models()[0]).to_table(candidates=True)


def test_rows_are_operands():
    pytest.importorskip("pandas")
    report = report_of(operator("a", 20.0, math.inf), operator("b", math.nan, reason="because"))
    table = QuantizationReport((*report.operators, OperatorReport("c", "", "MatMul", (), "skipped")), 1, 4, 4)
    actual = table.to_dataframe()
    assert list(actual.columns) == list(COLUMNS) and list(actual["module"]) == ["a", "a", "b", ""]
    assert list(actual["sqnr"])[:2] == [20.0, math.inf] and actual["sqnr"].isna().tolist() == [False, False, True, True]
    assert list(actual["bytes_after"]) == [34, 34, 34, 0] and actual["tensor_scale"].dtype == "float64"
    assert list(actual["notes"])[2:] == ["because", "skipped"] and list(actual["role"])[2:] == ["weight", ""]
    assert actual[actual.role == "weight"].groupby("format").bytes_after.sum().to_dict() == {"mxfp4_e2m1{32}": 102}


def test_without_pandas(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pandas" else find(name))
    with pytest.raises(MXError, match=r"^pandas is not installed: pip install pandas$"):
        report_of(operator("a", 20.0)).to_dataframe()


class Scores(torch.nn.Module):
    def forward(self, x):
        return x @ x.t()


def test_an_operator_outside_of_modules_has_its_node_and_line():
    report = quantization_report(prepare(Scores(), (torch.ones(4, 64),), MXQuantizationConfig(activation="mxfp8")))
    (actual,) = report.operators
    line = Scores.forward.__code__.co_firstlineno + 1
    assert (actual.module, actual.source) == ("", f"test_report.py:{line}")
    assert actual.label == f"{actual.name} (test_report.py:{line})" and actual.label in report.to_table()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(nn.Linear(64, 8)), (torch.ones(2, 64),)),
        (nn.Sequential(nn.Embedding(8, 64)), (torch.arange(4),)),
    ],
    ids=["a matmul", "a gather"],
)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_weight_only"])
def test_packed_weights_are_refused(model, inputs, recipe):
    converted = convert(model, inputs, recipe)
    assert quantization_report(converted).weight_bits in (4.25, 8.25)
    with pytest.raises(MXError, match=r"reads a packed weight, as lower_to_inductor leaves it: report the converted"):
        quantization_report(lower_to_inductor(converted))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.0._flat_weights")  # export's
def test_operators_that_stay_are_reported_as_before():
    converted = convert(nn.Sequential(nn.LSTM(64, 32)), (torch.ones(3, 2, 64),), "mxfp8")
    before, after = quantization_report(converted), quantization_report(lower_to_inductor(converted))
    for total in ("bytes_before", "bytes_after", "values", "weight_bits"):
        assert getattr(after, total) == getattr(before, total), total
    specs = [[(o.role, o.spec) for o in report.operators[0].operands] for report in (before, after)]
    assert specs[0] == specs[1] and ("activation", "mxfp8_e4m3{32}") in specs[0]
    unpacked = quantization_report(lower_to_inductor(converted, unpack=True))
    assert unpacked.bytes_after == unpacked.bytes_before == before.bytes_before  # the weights are float again


@pytest.mark.parametrize(
    ("weight", "preset"), [("mxfp4", "fast"), ("mxfp4", "balanced"), ("mxfp4", "best"), ("nvfp4", "balanced")]
)
def test_weights_that_algorithms_rounded_show_the_error_from_float(weight, preset):
    """Not infinity, though the format holds the rounded values exactly."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    model = exported(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False)).eval(), x)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight=weight))
    optimized = pt2mx.optimize(model, quantizer, [(x,)], preset=preset)
    prepared = pt2mx.prepare_pt2e(optimized, quantizer)
    for report in (quantization_report(prepared), quantization_report(pt2mx.convert_pt2e(prepared))):
        ratios = [operator.operands[1].statistics.sqnr for operator in report.operators]
        assert all(16 < ratio < 23 for ratio in ratios)
        if preset == "fast":  # whose errors are those of the weights themselves
            errors = [weight.after for weight in pt2mx.optimization_report(optimized).weights]
            assert ratios == pytest.approx([-10 * math.log10(error) for error in errors if error], abs=1e-3)
