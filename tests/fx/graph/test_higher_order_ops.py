import copy

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config, ops
from pt2mx.fx.graph.higher_order_ops import graph_modules, hop_calls
from tests.flow import train
from tests.subgraph_models import MODELS, QUANTIZER, Autocast, Base, Checkpoint, Cond, NoGrad, Repeated, X


@pytest.mark.compiled_except("Cond", "Checkpoint")
@pytest.mark.slow_cases("Nested", "Scan")
@pytest.mark.parametrize("model", MODELS)
def test_what_is_inside_is_quantized(model, quantize, tmp_path):
    torch.manual_seed(0)
    model = model().eval()
    program = torch.export.export(model, (X,))
    want, prepared, converted = quantize(program, QUANTIZER, (X,))
    with torch.no_grad():
        assert torch.equal(converted(X), want)
        assert torch.equal(converted(-X), prepared(-X))  # the other branch
        assert not torch.equal(want, model(X))
        assert nn.functional.cosine_similarity(want, model(X)).min() > 0.9

    # every linear layer and matmul has two pairs, every weight is packed, once, outside
    graphs = graph_modules(converted)
    matmuls = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)
    layers = [n for g in graphs for n in g.graph.nodes if n.target in matmuls]
    assert len(layers) >= 2
    for node in layers:
        assert all(n.target is ops.dequantize_mx for n in node.args[:2])
    assert not any("weight" in key for key, value in converted.state_dict().items() if value.is_floating_point())
    for inner in graphs[:-1]:
        quantized = [n.args[0] for n in inner.graph.nodes if n.target is ops.quantize_mx]
        assert not any(n.meta.get("mx_constant") for n in quantized)

    with torch.no_grad():
        again = torch.export.export(converted, (X,))
        torch.export.save(again, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2").module()
        assert torch.equal(loaded(X), want)
        assert torch.equal(copy.deepcopy(converted)(X), want)


@pytest.mark.compiled
@pytest.mark.parametrize("model", [NoGrad, Autocast, Cond])  # torch 2.13 does not compile the float scan either
def test_compiles(model, quantize, compiler):
    want, _, converted = quantize(torch.export.export(model().eval(), (X,)), QUANTIZER, (X,))
    with torch.no_grad():
        got = torch.compile(converted)(X)
    assert nn.functional.cosine_similarity(got, want).min() > 0.999


def test_dynamic_sizes_break_no_graph(quantize, compiler):
    """torch.compile may break a graph, as without `fullgraph`: Dynamo fails to break a branch."""
    batch = {"x": {0: torch.export.Dim.DYNAMIC}}
    _, _, converted = quantize(torch.export.export(Cond().eval(), (X,), dynamic_shapes=batch), QUANTIZER, (X,))
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(converted, dynamic=True, backend=count)
    with torch.no_grad():
        for x in (X, -X, X[:3]):
            assert torch.equal(compiled(x), converted(x))
    assert len(graphs) == 1


@pytest.mark.compiled
def test_branches_in_a_package(quantize, compiler, tmp_path):
    """The tables of codes reach the code of branches, which torch gives no constants of their own."""
    _, _, converted = quantize(torch.export.export(Cond().eval(), (X,)), QUANTIZER, (X,))
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(converted, (X,)), package_path=str(tmp_path / "model.pt2")
        )
        loaded = torch._inductor.aoti_load_package(package)
        for x in (X, -X):
            assert nn.functional.cosine_similarity(loaded(x), converted(x)).min() > 0.999


@pytest.mark.slow_cases("Cond")
@pytest.mark.parametrize("model", [Autocast, Cond, Checkpoint])
def test_trains(model):
    torch.manual_seed(0)
    prepared = pt2mx.prepare_qat_pt2e(torch.export.export(model().train(), (X,)).module(), QUANTIZER)
    losses = train(prepared, X, steps=20, optimizer=torch.optim.Adam, target=1)
    assert losses[-1] < 0.3 * losses[0]
    converted = pt2mx.convert_pt2e(prepared)
    with torch.no_grad():
        assert torch.equal(converted(X), prepared(X))


def test_calibration_with_gradients_is_refused_where_nothing_can_be_seen():
    prepared = pt2mx.prepare_pt2e(torch.export.export(Cond().eval(), (X,)).module(), QUANTIZER)
    with pytest.raises(pt2mx.MXError, match=r"calibrate under torch.no_grad\(\)"):
        prepared(X)
    pt2mx.disable_observer(prepared)
    assert prepared(X).requires_grad


def test_settings_reach_inside():
    module = torch.export.export(Cond().eval(), (X,)).module()
    config = get_default_mx_quantization_config("mxfp4", "mxfp8")
    quantizer = MXQuantizer().set_global(config).set_module_name("inner", None)
    prepared = pt2mx.prepare_pt2e(module, quantizer)
    assert not any(
        isinstance(m, pt2mx.MXObserver) for c in hop_calls(prepared) for _, g in c.graphs for m in g.modules()
    )
    assert len([m for m in prepared.modules() if isinstance(m, pt2mx.MXObserver)]) == 2


class Between(Base):
    """Run a subgraph between two layers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        return self.head(self.apply_inner(self.outer(x)))

    def apply_inner(self, x):
        with torch.no_grad():
            return torch.relu(self.inner(x))


def test_first_and_last_go_by_the_order_of_execution():
    module = torch.export.export(Between().eval(), (X,)).module()
    config = get_default_mx_quantization_config("mxfp4", "mxfp8")
    quantizer = MXQuantizer().set_global(config).set_first(None).set_last(None)
    report = pt2mx.quantization_report(pt2mx.prepare_pt2e(module, quantizer))
    assert {o.module: o.quantized for o in report.operators} == {"outer": False, "inner": True, "head": False}


def test_the_callers_graphs_are_unchanged(quantize):
    program = torch.export.export(Cond().eval(), (X,))
    module = program.module()
    before = [g.code for g in graph_modules(module)]
    pt2mx.convert_pt2e(pt2mx.prepare_pt2e(module, QUANTIZER))
    assert [g.code for g in graph_modules(module)] == before
    assert not any("mx_constant" in n.meta for g in graph_modules(module) for n in g.graph.nodes)


def test_a_graph_that_is_called_again_is_quantized_once(quantize):
    model = Repeated().eval()
    want, prepared, converted = quantize(torch.export.export(model, (X,), strict=True), QUANTIZER, (X,))
    with torch.no_grad():
        assert torch.equal(converted(X), want)
        x = X
        for layer in model.layers:
            weight = pt2mx.fake_quantize_mx(layer.weight, "mxfp4")
            x = torch.relu(nn.functional.linear(pt2mx.fake_quantize_mx(x, "mxfp8"), weight, layer.bias))
        assert torch.equal(want, x)
    shared = [len(group) for group in ([*c.graphs] for c in hop_calls(prepared))]
    assert shared == [1, 1]
    assert all(
        len([m for m in g.modules() if isinstance(m, pt2mx.MXObserver)]) == 2 for g in graph_modules(prepared)[:-1]
    )
    reports = [pt2mx.quantization_report(m) for m in (prepared, converted)]
    assert reports[0].bytes_before == reports[1].bytes_before == 3 * (64 * 64 + 64) * 4
    assert reports[0].bytes_after == reports[1].bytes_after == 3 * (64 * 34 + 64 * 4)
