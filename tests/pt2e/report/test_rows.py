"""The rows of a report: roles, bytes, reasons and notes; rows read back from JSON."""

import json
import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, quantization_report
from pt2mx.pt2e.report.report import QuantizationReport
from tests.flow import exported, prepare
from tests.models import exported_conv, module_of
from tests.reports import HOSTILE, operator, report_of

CONFIG = MXQuantizationConfig(weight="mxfp4", activation="mxfp8")


@pytest.mark.parametrize("fold", [True, False])
def test_roles_of_operands_whose_producer_takes_a_list(fold):
    inputs = (torch.randn(2, 8),)
    cat = module_of(
        lambda self, x: (torch.cat([x, x], -1) @ self.weight, torch.stack([x, x]) @ x.t()),
        weight=nn.Parameter(torch.randn(16, 4)),
    )
    prepared = pt2mx.prepare_pt2e(torch.export.export(cat, inputs).module(), MXQuantizer().set_global(CONFIG))
    for model in (prepared, pt2mx.convert_pt2e(prepared, fold_quantize=fold)):
        first, second = quantization_report(model).operators
        assert [o.role for o in first.operands] == ["activation", "weight"]
        assert [o.role for o in second.operands] == ["activation", "activation"]


def test_operators_that_are_not_supported_are_named():
    unsupported = module_of(
        lambda self, x: torch.cdist(self.fc(x), self.centers),
        fc=nn.Linear(8, 8),
        centers=nn.Parameter(torch.randn(5, 8)),
    )
    prepared = prepare(unsupported, (torch.randn(4, 8),), CONFIG)
    for model in (prepared, pt2mx.convert_pt2e(prepared)):
        report = quantization_report(model)
        fc, cdist = report.operators
        assert fc.quantized and (cdist.operator, cdist.quantized) == ("aten.cdist", False)
        assert cdist.reason == "pt2mx cannot quantize this operator"
        assert [(o.role, o.spec, o.bytes_before, o.bytes_after) for o in cdist.operands] == [
            ("activation", None, 0, 0), ("weight", None, 160, 160),
        ]  # fmt: skip
        assert report.bytes_before == 4 * (64 + 8 + 40) and report.bytes_after == 8 * 5 + 32 + 160
        assert "aten.cdist   -               -" in report.to_table() and "1 of 2 operators" in report.summary


def test_operators_of_sub_graphs_are_named():
    branches = module_of(
        lambda self, x: torch.cond(x.sum() > 0, lambda x: torch.cdist(x, x) @ x, lambda x: x + 1, (self.fc(x),)),
        fc=nn.Linear(8, 8),
    )
    prepared = prepare(branches, (torch.ones(8, 8),), CONFIG)
    report = quantization_report(prepared)
    by_name = {o.name: o for o in report.operators}
    assert next(iter(by_name)) == "linear" and by_name["linear"].quantized
    (cdist,) = [o for name, o in by_name.items() if name.startswith("true_graph_0.") and o.operator == "aten.cdist"]
    assert cdist.reason == "pt2mx cannot quantize this operator"
    (matmul,) = [o for o in report.operators if o.operator == "aten.matmul"]
    assert matmul.name.startswith("true_graph_0.") and matmul.quantized


def test_an_exported_model_that_was_never_prepared():
    report = quantization_report(exported_conv())
    assert [(o.operator, o.reason) for o in report.operators] == [
        ("aten.conv2d", "the quantizer did not select it"), ("aten.linear", "the quantizer did not select it"),
    ]  # fmt: skip
    assert report.bytes_before == report.bytes_after and report.effective_bits == pytest.approx(32, rel=0.01)
    assert report.weight_bits == 0


def test_a_weight_that_is_kept_in_two_forms_is_counted_so():
    inputs = (torch.randn(2, 64), torch.randn(2, 32))
    both = module_of(
        lambda self, x, y: (x @ self.weight, torch.cdist(y, self.weight), nn.functional.linear(y, self.weight)),
        weight=nn.Parameter(torch.randn(64, 32)),
    )
    report = quantization_report(prepared := prepare(both, inputs, MXQuantizationConfig(weight="mxfp4")))
    along_rows, along_columns = 64 * (16 + 1), 32 * (32 + 2)
    assert [(o.operands[1].bytes_before, o.operands[1].bytes_after) for o in report.operators] == [
        (8192, along_columns), (0, 8192), (0, along_rows),
    ]  # fmt: skip
    assert report.bytes_after == 8192 + along_rows + along_columns
    saved = sum(t.nbytes for t in pt2mx.convert_pt2e(prepared).state_dict().values())
    assert report.bytes_after == saved


def test_values_that_are_odd_are_said():
    batch = ({0: torch.export.Dim("batch")},)
    x = torch.randn(3, 64)
    x[0, 0], x[1, 40] = float("inf"), float("nan")
    model = torch.export.export(nn.Sequential(nn.Linear(64, 8)).eval(), (x,), dynamic_shapes=batch).module()
    prepared = pt2mx.prepare_pt2e(model, MXQuantizer().set_global(CONFIG))
    prepared(x), prepared(x[:0])
    for model in (prepared, pt2mx.convert_pt2e(prepared)):
        (operator,) = quantization_report(model).operators
        assert operator.reason is None
        assert operator.notes == "activation: 2 of 192 values are Inf or NaN, 1 of 2 tensors are empty"
        assert operator.notes in quantization_report(model).to_table()
        assert operator.operands[0].statistics.sqnr > 20


def test_a_weight_that_subgraphs_share_is_counted_once():
    shared_by_branches = module_of(
        lambda self, x: self.fc(torch.cond(x.sum() > 0, lambda x: self.fc(x), lambda x: self.fc(x + 1), (x,))),
        fc=nn.Linear(32, 32, bias=False),
    )
    prepared = prepare(shared_by_branches, (torch.ones(4, 32),), CONFIG)
    for report in (quantization_report(prepared), quantization_report(pt2mx.convert_pt2e(prepared))):
        assert (report.bytes_before, report.bytes_after, report.values) == (32 * 32 * 4, 32 * 17, 32 * 32)


def test_a_weight_with_a_batch_norm_in_training_is_counted():
    x = torch.randn(4, 32, 3, 3)
    model = torch.export.export(nn.Sequential(nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32)).eval(), (x,))
    prepared = pt2mx.prepare_qat_pt2e(model.module(), MXQuantizer().set_global(CONFIG))
    (operator,) = quantization_report(prepared).operators
    weight = operator.operands[1]
    scaled_by = 2 * 32 * 4  # the weight and the running variance of the batch norm
    assert (weight.role, weight.bytes_before, weight.bytes_after) == ("weight", 32 * 32 * 4 + scaled_by, 32 * 17)


def test_notes_name_weights_larger_than_their_format():
    model = nn.Sequential(nn.Conv2d(32, 32, 3, groups=32), nn.Flatten(), nn.Linear(32, 32))
    quantizer = MXQuantizer().set_global(CONFIG).set_module_name("2", MXQuantizationConfig(weight="int5{32}"))
    prepared = pt2mx.prepare_pt2e(exported(model.eval(), torch.randn(2, 32, 3, 3)), quantizer)
    for model in (prepared, pt2mx.convert_pt2e(prepared)):
        depthwise, linear = quantization_report(model).operators
        assert depthwise.notes == (
            "weight: 8 bits a value: blocks of only 3 values, each with a scale and whole bytes of its own"
        )
        assert linear.notes == "weight: 8.25 bits a value: codes of 5 bits take 8"
        assert depthwise.operands[1].bytes_after == depthwise.operands[1].values
    whole = pt2mx.convert_pt2e(prepared, fold_quantize=False)
    assert [operator.notes for operator in quantization_report(whole).operators] == ["", ""]


def test_operators_that_conversion_computes_are_no_rows():
    low_rank = module_of(
        lambda self, x: nn.functional.linear(x, self.a @ self.b),
        a=nn.Parameter(torch.randn(32, 4)),
        b=nn.Parameter(torch.randn(4, 32)),
    )
    prepared = prepare(low_rank, (torch.randn(2, 32),), CONFIG)
    for model in (prepared, pt2mx.convert_pt2e(prepared)):
        (linear,) = quantization_report(model).operators
        assert linear.operator == "aten.linear"
        assert (linear.operands[1].bytes_before, linear.operands[1].bytes_after) == (2 * 4 * 128, 32 * 17)


def test_a_report_comes_back(tmp_path):
    report = report_of(operator("a", 20.5, 3.0), *(operator(name, 1.0, reason=name) for name in HOSTILE))
    report.to_json(tmp_path / "report.json")
    assert QuantizationReport.from_json(tmp_path / "report.json") == report


def test_ratios_that_were_not_finite_are_nan(tmp_path):
    report_of(operator("a", math.inf)).to_json(tmp_path / "report.json")
    (actual,) = QuantizationReport.from_json(tmp_path / "report.json").operators
    assert math.isnan(actual.operands[0].statistics.sqnr)
    assert actual.operands[0].statistics.exponents == {-3: 1, 2: 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot read '.*report\.json' as a report in JSON: .*No such file"),
        ("{", "cannot read .* as a report in JSON: Expecting property name"),
        ("[]", "is no report that QuantizationReport.to_json wrote: TypeError"),
        ("{}", "is no report that QuantizationReport.to_json wrote: KeyError: 'operators'"),
        ('{"operators": [{"operands": 5}]}', "is no report that QuantizationReport.to_json wrote: TypeError"),
        ('{"operators": []}', "is no report that QuantizationReport.to_json wrote: KeyError: 'values'"),
        ('{"operators": [], "values": "1"}', "is no report that QuantizationReport.to_json wrote: TypeError: 'str'"),
        ("[" * 100_000, "cannot read .* as a report in JSON: maximum recursion depth"),
    ],
)
def test_files_that_are_no_report(text, message, tmp_path):
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(MXError, match=message):
        QuantizationReport.from_json(file)


def test_arguments_that_are_no_path():
    with pytest.raises(MXError, match=r"cannot read '5' as a report in JSON: .*not '?int"):
        QuantizationReport.from_json(5)


def test_fields_that_no_operator_has(tmp_path):
    file = tmp_path / "report.json"
    saved = json.loads(report_of(operator("a", 1.0)).to_json())
    saved["operators"][0]["more"] = 1
    file.write_text(json.dumps(saved))
    with pytest.raises(MXError, match=r"TypeError: .*unexpected keyword argument 'more'"):
        QuantizationReport.from_json(file)
