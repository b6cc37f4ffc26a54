"""The bytes and the operators of a report are those of the files, of a prepared model as of the converted one."""

import pytest
import torch
from torch import nn

import pt2mx
from tests.flow import saved_bytes, unused_bytes
from tests.models import module_of

functional = nn.functional
QUANTIZER = pt2mx.MXQuantizer().set_global(pt2mx.get_default_mx_quantization_config("mxfp4", "mxfp4"))
X = torch.linspace(-1, 1, 4 * 64).reshape(4, 64)


class Layers(nn.Module):
    """Two layers and two parameters for `forward(self, x)`, which is given."""

    def __init__(self, forward, training=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.u, self.v = nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(32, 64))
        self.function = forward
        self.train(training)

    def forward(self, x):
        return self.function(self, x)


def dead_dropout(self, x):
    functional.dropout(self.b(x), 0.5, self.training)
    return self.a(x)


def dead_dropout_in_place(self, x):
    functional.dropout(self.b(x), 0.5, self.training, inplace=True)
    return self.a(x)


def dead_attention(self, x):
    y = self.b(x).view(1, 1, 4, 64)
    functional.scaled_dot_product_attention(y, y, y, dropout_p=0.5 if self.training else 0.0)
    return self.a(x)


def dead_rrelu(self, x):
    y = self.a(x)
    functional.rrelu_(y.view(-1), training=self.training)  # its result is dead, and it writes y
    return self.b(y)


def dead_in_subgraph(self, x):
    with torch.no_grad():
        functional.dropout(self.b(x), 0.5, self.training)
        return self.a(x)


def dead_layer(self, x):
    self.b(x)
    return self.a(x)


def autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return self.b(self.a(x)).float()


def cast_in_autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return functional.linear(x, self.b.weight.to(torch.bfloat16)).float()


def cast_in_nested_autocast(self, x):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return functional.linear(x, self.b.weight.to(torch.bfloat16)).float()


def product_of_parameters(self, x):
    return self.a(x) @ (self.u @ self.v)


def added_product_of_parameters(self, x):
    return self.a(x) + (self.u @ self.v)[:4]


def shared(self, x):
    return functional.linear(self.b(x), self.b.weight) @ self.b.weight


def branches(self, x):
    return torch.cond(x.sum() > 9, lambda x: self.a(x), lambda x: self.b(x) + self.a(x), (x,))


MODELS = [
    dead_dropout, dead_dropout_in_place, dead_attention, dead_rrelu, dead_in_subgraph, dead_layer, autocast,
    cast_in_autocast, cast_in_nested_autocast, product_of_parameters, added_product_of_parameters, shared, branches,
]  # fmt: skip


def facts(report):
    """Return what does not depend on calibration."""
    operands = [(o.name, p.role, p.spec, p.bytes_before, p.bytes_after) for o in report.operators for p in o.operands]
    return operands, [(o.name, o.operator, o.notes) for o in report.operators]


@pytest.mark.compiled_except(
    "branches-False",
    "dead_dropout-True",
    "dead_in_subgraph-False",
    "dead_rrelu-True",
    "dead_layer-False",
    "cast_in_autocast-False",
    "product_of_parameters-False",
    "shared-True",
)
@pytest.mark.filterwarnings("ignore:the exported model runs .* in training mode")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("forward", MODELS)
def test_reports_agree_with_files(forward, training):
    program = torch.export.export(Layers(forward, training), (X,))
    before = saved_bytes(program) - unused_bytes(program)
    for prepare in (pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e):
        prepared = prepare(program.module(), QUANTIZER).eval()
        with torch.no_grad():
            prepared(X)
            converted = pt2mx.convert_pt2e(prepared)
            after = saved_bytes(torch.export.export(converted, (X,)))
        reports = [pt2mx.quantization_report(model) for model in (prepared, converted)]
        assert facts(reports[0]) == facts(reports[1])
        assert [(r.bytes_before, r.bytes_after) for r in reports] == [(before, after)] * 2


def normalized(length):
    """Convolutions with batch norms and activations in place, a row of them between two that share their tensors."""
    shared = nn.Sequential(nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU(inplace=True))
    row = (nn.Sequential(nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32), nn.ReLU(inplace=True)) for _ in range(length))
    blocks = nn.Sequential(*row)
    return module_of(lambda self, x: self.shared(self.blocks(self.shared(x))), shared=shared, blocks=blocks)


@pytest.mark.slow_cases("80-*")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "length", [2, 80]
)  # of 80 the inputs of a node, and their inputs, are deeper than Python calls
def test_a_report_of_fused_batch_norms_agrees_with_the_file(length, training):
    x = torch.linspace(-1, 1, 32 * 4).reshape(1, 32, 2, 2)
    program = torch.export.export(normalized(length).train(training), (x,))
    prepared = pt2mx.prepare_qat_pt2e(program.module(), QUANTIZER).eval()
    with torch.no_grad():
        prepared(x)
        converted = pt2mx.convert_pt2e(prepared)
        after = saved_bytes(torch.export.export(converted, (x,)))
    assert not [name for name in converted.state_dict() if name.endswith(("running_mean", "running_var"))]
    assert [pt2mx.quantization_report(model).bytes_after for model in (prepared, converted)] == [after] * 2


def test_a_report_names_what_conversion_computes():
    exported = torch.export.export(Layers(product_of_parameters), (X,)).module()
    prepared = pt2mx.prepare_pt2e(exported, QUANTIZER)
    converted = pt2mx.convert_pt2e(prepared)
    for report in map(pt2mx.quantization_report, (prepared, converted)):
        assert [operator.name for operator in report.operators] == ["linear", "matmul_1"]
        assert [operand.matmuls for operand in report.operators[1].operands] == [(), ("matmul",)]
        assert report.operators[1].notes == "weight: matmul computes it once, at conversion"


def test_a_report_of_a_file_names_what_conversion_computes(tmp_path):
    exported = torch.export.export(Layers(product_of_parameters), (X,)).module()
    report = pt2mx.quantization_report(pt2mx.prepare_pt2e(exported, QUANTIZER))
    report.to_json(tmp_path / "report.json")
    assert type(report).from_json(tmp_path / "report.json").operators == report.operators
