"""The flow of exported graphs with pt2-bfp's arguments."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e import pt2bfp
from tests.compare import same
from tests.flow import exported, train
from tests.graph import namespaces
from tests.models import module_of

QCONFIG = pt2bfp.QConfig(pt2bfp.MinMaxObserver.with_args(eps=2**-12), pt2bfp.HistogramObserver)
NARROW = pt2bfp.QConfig(*[pt2bfp.MinMaxObserver.with_args(dtype="BFP[4|8]{16}(SN)")] * 2)


class Net(nn.Module):
    """Modules, one within another and one called twice, a batch norm, a functional linear and a matmul."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):  # (B, 3, H, W) -> (B, 4)
        x = self.stem(x).flatten(2).mean(2)
        x = nn.functional.linear(self.body(self.body(x)), self.weight)
        return self.head(torch.matmul(x, x.transpose(0, 1)) @ x)


X = torch.randn(1, 3, 6, 6)


def calls(model):
    return [node.op for node in model.graph.nodes if node.op == "call_module"]


@pytest.mark.compiled
@pytest.mark.slow_except("symbolic_trace")
@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda model: model])
def test_the_flow_of_exported_graphs(trace):
    model = trace(Net().eval())
    mapping = pt2bfp.QConfigMapping().set_global(QCONFIG).set_module_name("head", NARROW)
    prepared = pt2bfp.prepare_fx(model, mapping, (X,))
    batch = torch.randn(5, 3, 6, 6)  # of another size
    with torch.no_grad():
        torch.testing.assert_close(prepared(batch), model(batch))
    converted = pt2bfp.convert_fx(prepared)
    expected = pt2mx.convert_pt2e(
        pt2mx.prepare_pt2e(exported(model, batch, dynamic_shapes=({0: torch.export.Dim.AUTO},)), mapping)
    )
    with torch.no_grad():
        assert same(converted(batch), expected(batch))
    buffers = dict(converted.named_buffers())
    assert {name: value.shape[-1] for name, value in buffers.items() if name.startswith("head")} == {
        "head.weight_data": 4,  # two codes a byte
        "head.weight_scale": 1,
    }
    assert sum(name.endswith("weight_data") for name in buffers) == 4
    pt2bfp.disable_observer(prepared)
    pt2bfp.enable_fake_quant(prepared)
    with torch.no_grad():
        assert same(prepared(batch), converted(batch))


def test_settings_mean_the_modules_of_a_traced_graph():
    model = torch.fx.symbolic_trace(Net().eval())
    assert calls(model)
    mapping = {
        "": None,
        "object_type": [(nn.Conv2d, QCONFIG), (torch.nn.functional.linear, None)],
        "module_name": [("body", QCONFIG)],
    }
    prepared = pt2bfp.prepare_fx(model, mapping, (X,))
    report = pt2mx.quantization_report(prepared)
    assert [operator.module for operator in report.operators if operator.quantized] == ["stem.0", "body", "body"]


def test_training():
    model = torch.fx.symbolic_trace(Net().train())
    qat = pt2bfp.prepare_qat_fx(model, {"": NARROW}, (torch.randn(4, 3, 6, 6),))
    batch = torch.randn(4, 3, 6, 6)
    train(qat, batch, steps=2)
    assert all(parameter.grad is not None for parameter in qat.parameters() if parameter.dim() > 1)
    with torch.no_grad():
        assert same(pt2bfp.convert_fx(qat)(batch), qat.eval()(batch))


def test_a_model_of_one_row():
    one_row = module_of(lambda self, x: self.linear(x.view(1, 8)), linear=nn.Linear(8, 4))
    prepared = pt2bfp.prepare_fx(one_row.eval(), {"": QCONFIG}, (torch.randn(1, 8),))
    assert prepared(torch.randn(1, 8)).shape == (1, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pt2bfp.prepare_fx(torch.relu, {}, (X,)), "expected a module"),
        (lambda: pt2bfp.prepare_fx(Net().eval(), {}, X), "example_inputs must be a tuple"),
        (lambda: pt2bfp.prepare_fx(Net().eval(), {}, (X, X)), "torch.export cannot export the model"),
        (lambda: pt2bfp.prepare_fx(Net().eval(), "mxfp8", (X,)), "expected a dictionary of settings"),
        (lambda: pt2bfp.convert_fx(nn.Linear(2, 2)), "expected a prepared model"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(MXError, match=message):
        call()


def prepared_with_keyword():
    torch.manual_seed(0)
    spec, dim = pt2bfp.BFPQuantizationSpec("BFP[8|8]{16}(SN)"), torch.export.Dim.DYNAMIC
    quantizer = pt2bfp.BFPQuantizer().set_global(pt2bfp.BFPQuantizationConfig(spec, spec, spec, None))
    shapes = {"x": {0: dim}, "ids": {0: dim}}
    with_keyword = module_of(
        lambda self, x, *, ids: self.linear(x + self.embedding(ids)),
        linear=nn.Linear(40, 8),
        embedding=nn.Embedding(9, 40),
    )
    graph = exported(with_keyword.eval(), torch.randn(4, 40), kwargs={"ids": torch.arange(4)}, dynamic_shapes=shapes)
    return pt2bfp.prepare_pt2e(graph, quantizer)


@torch.no_grad()
@pytest.mark.compiled
def test_the_reference_representation_has_aten_operators_only():
    model = prepared_with_keyword()
    converted, reference = (pt2bfp.convert_pt2e(model, use_reference_representation=flag) for flag in (False, True))
    assert "pt2mx" in namespaces(converted)
    assert "pt2mx" not in namespaces(reference)
    for rows in (4, 7):  # dynamic as in the export
        x, ids = torch.randn(rows, 40), torch.arange(rows)
        assert same(reference(x, ids=ids), converted(x, ids=ids))
    assert pt2bfp.convert_pt2e(model, False, False).state_dict()["linear.weight"].dtype == torch.float32


@pytest.mark.parametrize("argument", [1, None, "yes"])
def test_use_reference_representation_must_be_a_bool(argument):
    with pytest.raises(MXError, match=r"use_reference_representation=.* must be True or False"):
        pt2bfp.convert_pt2e(prepared_with_keyword(), argument)
