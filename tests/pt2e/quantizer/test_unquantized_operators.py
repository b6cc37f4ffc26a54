import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer
from tests.models import module_of
from tests.quantized_by_hand import BOTH, A, Call, W, a, w


@pytest.mark.parametrize(
    ("equation", "count"),
    [
        ("ij,jk,kl->il", 3),  # three factors
        ("ij->ji", 1),
        ("ij,kl->ijkl", 2),  # an outer product
        ("ij,ij->ij", 2),  # elementwise
        ("ii,ij->j", 2),  # a diagonal
    ],
)
def test_an_einsum_that_is_no_matmul_stays_float(equation, count, quantize):
    model, inputs = Call(lambda *x: torch.einsum(equation, *x)).eval(), (torch.randn(4, 4),) * count
    _, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    assert torch.equal(converted(*inputs), model(*inputs))
    (report,) = pt2mx.quantization_report(converted).operators
    assert report.reason == "no matmul of two tensors: it reduces no dimension of both" and not report.operands


def test_elementwise_operators_are_quantized_only_where_they_are_named(quantize):
    residual = module_of(
        lambda self, x, y: ((x + y) * self.gate + 1.5, x.long() + y.long()), gate=nn.Parameter(torch.randn(40))
    )
    model, inputs = residual.eval(), (torch.randn(3, 40), torch.randn(3, 40))
    exported = torch.export.export(model, inputs)
    with torch.no_grad():
        _, _, alone = quantize(exported, BOTH, inputs)
        assert torch.equal(alone(*inputs)[0], model(*inputs)[0])
        assert not pt2mx.quantization_report(alone).operators
        config = MXQuantizationConfig(activation=A, weight=W)
        prepared, _, both = quantize(
            exported, MXQuantizer().set_operator_type("aten.add", config).set_operator_type("aten.mul", config), inputs
        )
        x, y = inputs
        want = a(a(a(x, -1) + a(y, -1), -1) * w(model.gate, -1), -1) + 1.5
        got = both(*inputs)
        assert torch.equal(got[0], want) and torch.equal(got[0], prepared[0])
        assert torch.equal(got[1], x.long() + y.long())
    reports = pt2mx.quantization_report(both).operators
    assert [o.operator for o in reports] == ["aten.add.Tensor", "aten.mul.Tensor", "aten.add.Tensor"]


def test_an_outer_product_stays_float(quantize):
    """Rotary embeddings multiply positions and frequencies: quantizing positions gains nothing and breaks them."""
    model = Call(torch.matmul)
    inputs = (torch.randn(2, 8, 1), torch.randn(2, 1, 8))
    _, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    assert torch.equal(converted(*inputs), model(*inputs))
    assert "outer product" in pt2mx.quantization_report(converted).operators[0].reason


def test_integer_operands_stay_integers(quantize):
    inputs = (torch.randn(4, 4),)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W))
    masked = module_of(lambda self, x: (torch.ones(4, 4, dtype=torch.int64) @ (x > 0).long()).float() @ x)
    _, _, converted = quantize(torch.export.export(masked, inputs), quantizer, inputs)
    counts = (torch.ones(4, 4, dtype=torch.int64) @ (inputs[0] > 0).long()).float()
    assert torch.equal(converted(*inputs), a(counts, -1) @ a(inputs[0], -2))
    reasons = [o.reason for o in pt2mx.quantization_report(converted).operators]
    assert "int64" in reasons[0] and reasons[1] is None


def test_tensors_inside_vmap_stay_float(quantize):
    model = Call(
        lambda x, weight, head: torch.vmap(lambda row: F.linear(row, weight))(x) @ head, (8, 16), (8, 4)
    ).eval()
    x = torch.randn(3, 16)
    config = MXQuantizationConfig(weight=W, activation=A)
    program = torch.export.export(model, (x,))
    want, prepared, converted = quantize(program, MXQuantizer().set_global(config), (x,))
    weight, head = model.p
    assert torch.equal(want, a(x @ w(weight, 1).t(), 1) @ w(head, 0)) and torch.equal(converted(x), want)
    assert "is inside torch.vmap" in pt2mx.quantization_report(prepared).operators[0].reason
