import math

import pytest
import torch
from torch import nn

from pt2mx import MXError, bisect
from pt2mx.pt2e.debug.errors import relative_error
from tests.fresh_process import run_file
from tests.stage_models import IDS, stages
from tests.subgraph_models import Branches


def broken(converted, name, factor=1.5):
    """The converted model, with the weight of one linear layer scaled after quantization."""
    model = torch.export.export(converted, (IDS,)).module()
    node = next(n for n in model.graph.nodes if n.name == name)
    with model.graph.inserting_before(node):
        larger = model.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[1], factor))
    node.args = (node.args[0], larger, *node.args[2:])
    model.recompile()
    return model


@pytest.mark.compiled
def test_another_graph(net, tmp_path):
    _, forms = net
    assert bisect(forms["converted"], forms["lowered"], IDS) is None
    path = tmp_path / "subgraph.py"
    worst = bisect(forms["converted"], broken(forms["converted"], "linear_3"), IDS, path=path)
    assert (worst.nodes, worst.modules, worst.path) == (("linear_3",), ("wide",), path)
    assert 0.4 < worst.error < 0.6  # with a bias
    *code, last = run_file(path).splitlines()
    assert last == f"relative error: {worst.error}" and any("linear" in line for line in code)


@pytest.mark.compiled
def test_a_form_that_is_made_of_subgraphs(net, tmp_path):
    _, forms = net
    assert bisect(forms["converted"], lambda subgraph, inputs: subgraph, IDS) is None

    def wrong_gelu(subgraph, inputs):
        for node in subgraph.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default):
            node.kwargs = {"approximate": "tanh"}
        subgraph.recompile()
        changed = torch.fx.GraphModule(subgraph, subgraph.graph)
        for node in subgraph.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default):
            node.kwargs = {}
        subgraph.recompile()
        return changed

    worst = bisect(forms["lowered"], wrong_gelu, IDS, bound=1e-5, path=tmp_path / "gelu.py")
    assert worst.nodes == ("gelu",) and 1e-5 < worst.error < 1e-2
    assert f"relative error: {worst.error}" in run_file(worst.path)


@pytest.mark.compiled
def test_compiled(net):
    exported, forms = net
    assert bisect(forms["lowered"], "compile", IDS, bound=0.05) is None
    worst = bisect(exported, "compile", IDS, bound=1e-12)  # sums in another order
    assert len(worst.nodes) <= 2 and worst.error < 1e-5


def test_a_subgraph_of_a_condition():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).abs()
    exported, forms = stages(Branches(), (x,), "mxfp4", "mxfp4")
    worst = bisect(exported, forms["converted"], x)
    assert worst.nodes == ("linear",) and 0.05 < worst.error < 0.3


def test_graphs_of_other_models(net):
    other = torch.export.export(nn.Embedding(100, 8), (IDS,)).module()  # the same name, but another shape
    with pytest.raises(MXError, match="the two graphs share no operator: give forms of one export"):
        bisect(net[0], other, IDS)


def test_relative_error():
    one = torch.tensor([3.0, 4.0])
    assert relative_error(one, one) == 0
    assert relative_error([one + torch.tensor([0.0, 0.5])], [one]) == 0.1
    assert relative_error(one * math.nan, one) == math.inf
    assert relative_error(torch.ones(3), torch.ones(2)) == math.inf
    assert relative_error(torch.ones(1), torch.zeros(1)) == math.inf
    assert relative_error(torch.tensor([1]), torch.tensor([2])) == 0
    odd = torch.tensor([math.nan, math.inf, -math.inf, 4.0])
    assert relative_error(odd, odd) == 0 and relative_error(odd + torch.tensor([0.0, 0, 0, 1]), odd) == 0.25
    for position in range(3):  # a number where there was none
        assert relative_error(odd.index_fill(0, torch.tensor(position), 1.0), odd) == math.inf


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"second": "compil"}, "second='compil' is unknown: did you mean 'compile'"),
        ({"second": 3}, "second must be one of compile, a graph, an ONNX file or a function, not 3"),
        ({"bound": 0}, "bound=0 must be a number above 0"),
        ({"path": 5}, r"path=5 must be a path that ends in \.py"),
        ({"path": "subgraph.pt"}, r"path='subgraph\.pt' must be a path that ends in \.py"),
        ({"first": nn.Linear(1, 1)}, "first must be a GraphModule, and is a module"),
        ({"path": "nowhere/subgraph.py"}, r"cannot write 'nowhere/subgraph\.py'"),
        ({"batch": (1, 2)}, "the model takes ids"),
        ({"batch": None}, "the model takes a tensor as ids, and a batch holds a NoneType"),
        ({"batch": IDS[:0]}, "the inputs of a batch are without values"),
        ({"second": nn.Linear(1, 1)}, "second must be a GraphModule, and is a module"),
        (
            {"second": lambda subgraph, inputs: None},
            "second must make a function of a subgraph and its inputs, not a NoneType",
        ),
    ],
)
def test_errors(net, options, text):
    exported, _ = net
    arguments = {"first": exported, "second": "compile", "batch": IDS, **options}
    with pytest.raises(MXError, match=text):
        bisect(arguments.pop("first"), arguments.pop("second"), arguments.pop("batch"), **arguments)
