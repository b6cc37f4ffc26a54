import json
import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, compare_stages
from pt2mx.pt2e.debug.errors import ErrorSums
from pt2mx.pt2e.page.page import asset
from tests.models import chain, module_of
from tests.stage_models import GRU, IDS, Normalized, stages
from tests.subgraph_models import Branches


def test_isolated_and_propagated_errors(net):
    exported, forms = net
    comparison = compare_stages(exported, forms, [IDS, {"ids": IDS.flip(0)}])
    linears = ("linear", "linear_1", "linear_2", "linear_3", "linear_4")
    rows = {name: {row.node: row for row in comparison.of_stage(name)} for name in forms}
    for name in forms:
        for node in linears:
            assert 10 < rows[name][node].isolated.sqnr < 25
        assert math.isinf(rows[name]["gelu"].isolated.sqnr)  # not quantized: no error of its own
        assert 5 < rows[name]["gelu"].propagated.sqnr < 25
    for node in linears:  # prepared is converted to the bit
        assert rows["prepared"][node].propagated == rows["converted"][node].propagated
        assert abs(rows["lowered"][node].isolated.sqnr - rows["converted"][node].isolated.sqnr) < 0.1
    # by hand: the first linear layer, for the float model's input
    with torch.no_grad():
        net = exported
        values = {}
        for ids in (IDS, IDS.flip(0)):
            x = nn.functional.layer_norm(net.emb.weight[ids], (64,), net.norm.weight, net.norm.bias)
            weight = pt2mx.fake_quantize_mx(net.q.weight, pt2mx.parse("mxfp4"))
            got = nn.functional.linear(pt2mx.fake_quantize_mx(x, pt2mx.parse("mxfp8")), weight, net.q.bias)
            want = nn.functional.linear(x, net.q.weight, net.q.bias)
            values[len(values)] = ((got - want).double().square().sum(), want.double().square().sum())
        noise, signal = (sum(pair[i] for pair in values.values()) for i in (0, 1))
    assert math.isclose(rows["converted"]["linear"].isolated.sqnr, 10 * math.log10(signal / noise), abs_tol=1e-6)


def test_a_prepared_model_is_not_changed(net):
    exported, forms = net
    observers = [m for m in forms["prepared"].modules() if isinstance(m, pt2mx.MXObserver)]
    before = [(o.observer_enabled, o.fake_quant_enabled, o.statistics) for o in observers]
    compare_stages(exported, {"prepared": forms["prepared"]}, [IDS])
    assert [(o.observer_enabled, o.fake_quant_enabled, o.statistics) for o in observers] == before


def test_an_injected_fault_is_the_first_line(net):
    exported, forms = net
    broken = torch.export.export(forms["converted"], (IDS,)).module()
    node = next(n for n in broken.graph.nodes if n.name == "linear_3")
    with broken.graph.inserting_before(node):
        larger = broken.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[1], 1.5))
    node.args = (node.args[0], larger, *node.args[2:])
    broken.recompile()
    comparison = compare_stages(exported, {"broken": broken}, [IDS])
    assert (
        comparison.rows[0].module == "wide" and comparison.rows[0].isolated.sqnr < 9 < comparison.rows[1].isolated.sqnr
    )


def test_a_wrong_axis_is_the_first_line():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    model = chain(one=nn.Linear(64, 64), relu=nn.ReLU(), two=nn.Linear(64, 64))
    model.two.weight.data *= torch.exp2(torch.arange(64) % 7)[:, None]  # otherwise all blocks have one scale
    exported, forms = stages(model, (x,), "mxfp8")
    broken = forms["converted"]
    wrong = next(n for n in broken.graph.nodes if n.name == "linear_1").args[1]
    scale = wrong.args[1]
    with broken.graph.inserting_after(scale):
        turned = broken.graph.call_function(torch.ops.aten.t.default, (scale,))
    args = list(wrong.args)
    wrong.args = (args[0], turned, *args[2:5], 0, *args[6:])
    broken.recompile()
    comparison = compare_stages(exported, {"broken": broken}, [x])
    assert comparison.rows[0].module == "two"


def test_subgraphs_are_compared():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    exported, forms = stages(Branches(), (x,), "mxfp4", "mxfp4")
    comparison = compare_stages(exported, forms, [x.abs(), -x.abs()])
    for name in forms:
        inside = [row for row in comparison.of_stage(name) if "linear" in row.operator]
        assert len(inside) == 2 and all(10 < row.isolated.sqnr < 25 and "/" in row.node for row in inside), name


@pytest.mark.compiled
@GRU
def test_folded_norms_written_inputs_and_tuples():
    x = torch.randn(2, 32, 10, 10, generator=torch.Generator().manual_seed(0))
    exported, forms = stages(Normalized(), (x,), "mxfp8", "mxfp8")
    forms["again"] = torch.export.export(forms["converted"], (x,)).module()
    comparison = compare_stages(exported, forms, [x])
    for name in forms:
        rows = {row.node: row for row in comparison.of_stage(name)}
        for node in ("batch_norm", "gru[0]", "linear"):
            assert 20 < rows[node].isolated.sqnr < 40, (name, node)
        assert math.isinf(rows["relu_"].isolated.sqnr) and 20 < rows["relu_"].propagated.sqnr < 40
        assert comparison.missing[name] == ("conv2d",)  # folded: no form has its value
    assert "again has nothing of conv2d: not compared" in comparison.to_table()
    # by hand: the convolution
    with torch.no_grad():
        scale = exported.norm.weight / (exported.norm.running_var + 1e-5).sqrt()
        folded = exported.conv.weight * scale[:, None, None, None]
        bias = (exported.conv.bias - exported.norm.running_mean) * scale + exported.norm.bias
        want = nn.functional.conv2d(x, folded, bias)
        spec = pt2mx.parse("mxfp8", axis=1)
        got = nn.functional.conv2d(pt2mx.fake_quantize_mx(x, spec), pt2mx.fake_quantize_mx(folded, spec), bias)
    sqnr = 10 * math.log10(want.double().square().sum() / (got - want).double().square().sum())
    row = next(row for row in comparison.of_stage("converted") if row.node == "batch_norm")
    assert math.isclose(row.isolated.sqnr, sqnr, abs_tol=0.01)


def test_buffers_that_a_model_writes_are_restored():
    def forward(self, x):
        self.seen.add_(x.sum(0))
        return self.linear(x) + self.seen

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    model = module_of(forward, linear=nn.Linear(64, 64), seen=nn.Buffer(torch.zeros(64)))
    exported, forms = stages(model, (x,), "mxfp8", "mxfp8")
    before = {name: form.seen.clone() for name, form in {"float": exported, **forms}.items()}
    comparison = compare_stages(exported, forms, [x, 2 * x])
    assert all(torch.equal(form.seen, before[name]) for name, form in {"float": exported, **forms}.items())
    linear = [row for row in comparison.rows if row.node == "linear"]
    assert len(linear) == 3 and all(row.isolated.sqnr > 20 for row in linear)


def test_functions_and_reloaded_programs(net, tmp_path):
    exported, forms = net
    pt2mx.save_program(torch.export.export(forms["converted"], (IDS,)), tmp_path / "net.pt2")
    reloaded = pt2mx.load_program(tmp_path / "net.pt2")
    comparison = compare_stages(exported, {"file": reloaded, "function": lambda ids: forms["converted"](ids)}, [IDS])
    (output,) = comparison.of_stage("function")
    assert (output.operator, output.isolated.values) == ("output", 0)
    by_name = compare_stages(exported, {"function": lambda other: forms["converted"](other)}, [{"ids": IDS}])
    assert by_name.rows[0].propagated == output.propagated  # called as the graph is
    last = {row.node: row for row in comparison.of_stage("file")}
    assert last["linear_4"].propagated == last["output 0"].propagated == output.propagated


def test_files(net, tmp_path):
    exported, forms = net
    comparison = compare_stages(exported, forms, [IDS])
    rows = json.loads(comparison.to_json(tmp_path / "stages.json"))
    assert rows == json.loads((tmp_path / "stages.json").read_text()) and len(rows) == len(comparison.rows)
    assert {"stage", "module", "operator", "node", "isolated", "propagated"} == set(rows[0])
    assert comparison.to_html(tmp_path / "stages.html") == (tmp_path / "stages.html").read_text()
    page = (tmp_path / "stages.html").read_text()
    assert asset("page.css") in page and page.count("<tr>") == 1 + len(comparison.rows)
    header, *lines = comparison.to_table(3).splitlines()
    assert header.split()[:2] == ["stage", "module"] and len(lines) == 3 + len(forms)


def test_names_of_stages_are_text(net):
    exported, forms = net
    comparison = compare_stages(exported, dict.fromkeys([1, "<b>"], forms["converted"]), [IDS])
    assert comparison.to_table().splitlines()[1].startswith("1 ")
    assert "&lt;b&gt;" in comparison.to_html() and "<b>" not in comparison.to_html()
    with pytest.raises(MXError, match="there is no stage '2': allowed: 1, <b>"):
        comparison.of_stage("2")
    with pytest.raises(MXError, match="worst=-1 must be a number of rows"):
        comparison.to_table(-1)


@pytest.mark.filterwarnings("ignore:The tensor attributes self.rnn._flat_weights")  # export's
def test_items_are_named_after_their_operator():
    def forward(self, x):
        y, (state, _) = self.rnn(x)
        return y, state

    exported, forms = stages(module_of(forward, rnn=nn.LSTM(64, 32)), (torch.randn(3, 2, 64),), "mxfp8", "mxfp8")
    comparison = compare_stages(exported, forms, [torch.randn(3, 2, 64)])
    for name in forms:
        items = {row.node: row for row in comparison.of_stage(name) if row.node.startswith("lstm")}
        assert {(row.module, row.operator) for row in items.values()} == {("rnn", "aten.lstm.input")}, name
        assert {"lstm[0]", "lstm[1]"} <= set(items)


def test_infinite_errors():
    one = ErrorSums()
    one.add(torch.tensor([math.inf, 1.0]), torch.tensor([1.0, 1.0]))
    assert one.max == math.inf and one.sqnr == -math.inf


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((nn.Linear(2, 2), {"a": len}, [IDS]), "float_model must be a GraphModule, and is a module"),
        ((None, {}, [IDS]), "stages must be a dict"),
        ((None, {"a": 3}, [IDS]), "the stage 'a' must be a graph, an ONNX file or a function, not int"),
        ((None, {"a": len}, []), "there is no batch"),
        ((None, {"a": len}, IDS), "batches is one of type Tensor: give a list of batches"),
        ((None, {"a": len}, None), "batches is one of type NoneType: give a list of batches"),
        ((None, {"a": len}, [None]), "the model takes a tensor as ids, and a batch holds a NoneType"),
        ((None, {"a": len}, [IDS[:0]]), "the inputs of a batch are without values"),
        ((None, {"a": len}, [IDS.float()]), r"the model does not run on inputs of shape \(.*\): "),
        ((None, {"a": len}, [(IDS, IDS)]), "the model takes ids: give each of them once, not 2 values"),
        ((None, {"a": len}, [{"x": IDS}]), "the model takes ids: give each of them once, not x"),
        ((None, {"a": lambda ids: (ids, ids)}, [IDS]), "gives 2 tensors where the float model gives 1"),
    ],
)
def test_errors(net, arguments, text):
    model, stages, batches = arguments
    with pytest.raises(MXError, match=text):
        compare_stages(net[0] if model is None else model, stages, batches)
