import json
import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.debug.stages import compare_stages

IDS = torch.arange(64).reshape(2, 32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm = nn.Embedding(100, 64), nn.LayerNorm(64)
        self.q, self.k, self.up, self.down = (nn.Linear(64, n) for n in (64, 64, 256, 100))
        self.wide = nn.Linear(256, 64)

    def forward(self, ids):
        x = self.norm(self.emb(ids))
        heads = [part[:, None] for part in (self.q(x), self.k(x), x)]
        x = x + nn.functional.scaled_dot_product_attention(*heads)[:, 0]
        return self.down(self.wide(nn.functional.gelu(self.up(x))))


def stages(model=None, example=(IDS,), weight="mxfp4", activation="mxfp8"):
    """The exported model, and its forms by name."""
    torch.manual_seed(0)
    model = (model or Net()).eval()
    exported = torch.export.export(model, example).module()
    config = pt2mx.get_default_mx_quantization_config(weight=weight, activation=activation)
    prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer().set_global(config))
    with torch.no_grad():
        prepared(*example)
    converted = pt2mx.convert_pt2e(prepared)
    return exported, {"prepared": prepared, "converted": converted, "lowered": pt2mx.lower_to_inductor(converted)}


@pytest.fixture(scope="module")
def net():
    return stages()


def test_isolated_and_propagated_errors(net):
    exported, forms = net
    found = compare_stages(exported, forms, [IDS, {"ids": IDS.flip(0)}])
    linears = ("linear", "linear_1", "linear_2", "linear_3", "linear_4")
    rows = {name: {row.node: row for row in found.of_stage(name)} for name in forms}
    for name in forms:
        for node in linears:
            assert 10 < rows[name][node].isolated.sqnr < 25
        assert math.isinf(rows[name]["gelu"].isolated.sqnr)  # not quantized: its own error is none
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


def test_a_prepared_model_stays_as_it_is(net):
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
    found = compare_stages(exported, {"broken": broken}, [IDS])
    assert found.rows[0].module == "wide" and found.rows[0].isolated.sqnr < 9 < found.rows[1].isolated.sqnr


def test_a_wrong_axis_is_the_first_line():
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.two(self.one(x).relu())

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    model = Square()
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
    found = compare_stages(exported, {"broken": broken}, [x])
    assert found.rows[0].module == "two"


def test_graphs_inside_are_compared():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return torch.cond(x.sum() > 0, self.one, self.two, (x,))

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    exported, forms = stages(Branches(), (x,), "mxfp4", "mxfp4")
    found = compare_stages(exported, forms, [x.abs(), -x.abs()])
    for name in forms:
        inside = [row for row in found.of_stage(name) if "linear" in row.operator]
        assert len(inside) == 2 and all(10 < row.isolated.sqnr < 25 and "/" in row.node for row in inside), name


def test_functions_and_reloaded_programs(net, tmp_path):
    exported, forms = net
    pt2mx.save_program(torch.export.export(forms["converted"], (IDS,)), tmp_path / "net.pt2")
    reloaded = pt2mx.load_program(tmp_path / "net.pt2")
    found = compare_stages(exported, {"file": reloaded, "function": lambda ids: forms["converted"](ids)}, [IDS])
    (output,) = found.of_stage("function")
    assert (output.operator, output.isolated.values) == ("output", 0)
    last = {row.node: row for row in found.of_stage("file")}
    assert last["linear_4"].propagated == last["output 0"].propagated == output.propagated


def test_files(net, tmp_path):
    exported, forms = net
    found = compare_stages(exported, forms, [IDS])
    rows = json.loads(found.to_json(tmp_path / "stages.json"))
    assert rows == json.loads((tmp_path / "stages.json").read_text()) and len(rows) == len(found.rows)
    assert {"stage", "module", "operator", "node", "isolated", "propagated"} == set(rows[0])
    assert found.to_html(tmp_path / "stages.html") == (tmp_path / "stages.html").read_text()
    header, *lines = found.to_table(3).splitlines()
    assert header.split()[:2] == ["stage", "module"] and len(lines) == 3 + len(forms)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((nn.Linear(2, 2), {"a": len}, [IDS]), "float_model must be a GraphModule, and is a module"),
        ((None, {}, [IDS]), "stages must be a dict"),
        ((None, {"a": 3}, [IDS]), "the stage 'a' must be a graph or a function, not int"),
        ((None, {"a": len}, []), "there is no batch"),
        ((None, {"a": len}, [(IDS, IDS)]), "the model takes ids: give each of them once, not 2 values"),
        ((None, {"a": len}, [{"x": IDS}]), "the model takes ids: give each of them once, not x"),
        ((None, {"a": lambda ids: (ids, ids)}, [IDS]), "gives 2 tensors where the float model gives 1"),
    ],
)
def test_errors(net, arguments, text):
    model, *rest = arguments
    with pytest.raises(MXError, match=text):
        compare_stages(net[0] if model is None else model, *rest)
