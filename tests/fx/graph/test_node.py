import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

import pt2mx
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.node import is_ours, make_positional, set_value, write_out_arguments, written_count
from tests.flow import convert, reloaded
from tests.models import module_of


def net(self, ids):
    """A matmul of two activations, an embedding, a branch."""
    x = self.table(ids)
    y = torch.cond(x.sum() > 0, lambda x: self.up(x), lambda x: self.down(x), (x,))
    return y @ y.transpose(0, 1)


IDS = torch.arange(33)


@pytest.fixture(scope="module", params=["mxfp8", "mxfp6"])  # one of codes that are packed, with lengths
def converted(request):
    torch.manual_seed(0)
    model = module_of(net, table=nn.Embedding(50, 64), up=nn.Linear(64, 48), down=nn.Linear(64, 48))
    return convert(model, (IDS,), request.param)


def lacking(model):
    """Return the calls of pt2mx's operators that lack arguments."""
    nodes = [node for graph in graph_modules(model) for node in graph.graph.nodes if is_ours(node)]
    assert len(nodes) >= 4
    return [node.name for node in nodes if len(node.args) < written_count(node.target) or node.kwargs]


def test_converted_and_lowered_models_have_all_arguments(converted):
    assert lacking(converted) == [] == lacking(pt2mx.lower_to_inductor(converted))
    (quantize, *_) = converted.graph.find_nodes(op="call_function", target=torch.ops.pt2mx.quantize_mx.default)
    assert quantize.args[4:] == ("floor", "even", None)


def test_what_tracing_left_out_is_written_out_again(converted):
    with torch.no_grad():
        program = torch.export.export(converted, (IDS,))
    assert lacking(program.graph_module), "torch.export keeps defaults now: save_program need not write them out"
    for graph in graph_modules(program.graph_module):
        write_out_arguments(graph)
    assert lacking(program.graph_module) == []
    loaded = reloaded(program)
    assert lacking(loaded.graph_module) == []
    with torch.no_grad():
        assert torch.equal(loaded.module()(IDS), converted(IDS))


def test_a_default_of_scales_is_left_out(converted):
    (quantize, *_) = converted.graph.find_nodes(op="call_function", target=torch.ops.pt2mx.quantize_mx.default)
    names = [argument.name for argument in quantize.target._schema.arguments]
    assert names[len(quantize.args) :] == ["scale_format", "block_rows", "tensor_scale"]


def test_keywords_take_their_positions():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.softmax.int, (x,), {"dtype": None, "dim": 1})
    make_positional(node)
    assert node.args == (x, 1, None) and node.kwargs == {}
    modes = {"block_size": 32, "axis": -1, "rounding": "even", "scale_mode": "floor"}
    node = graph.call_function(torch.ops.pt2mx.quantize_mx.default, (x, "int8"), modes)
    make_positional(node)
    assert node.args == (x, "int8", 32, -1, "floor", "even")
    make_positional(node, 7)
    assert node.args == (x, "int8", 32, -1, "floor", "even", None)


@pytest.fixture
def value():
    """Return a function that adds a call to a graph and returns its value."""
    graph = Graph()

    def call(target, *args):
        node = graph.call_function(target, args)
        set_value(node)
        return node.meta["val"]

    call.graph, call.mode = graph, FakeTensorMode(shape_env=ShapeEnv())
    return call


def placed(value, tensor):
    node = value.graph.placeholder("x")
    node.meta["val"] = value.mode.from_tensor(tensor)
    return node


def test_equal_calls_share_a_value(value):
    x, y, z = (placed(value, one) for one in (torch.ones(2, 3), torch.zeros(2, 3), torch.ones(3, 2).T))
    aten = torch.ops.aten
    assert value(aten.add.Tensor, x, 1) is value(aten.add.Tensor, y, 1)
    assert value(aten.add.Tensor, x, 1) is not value(aten.add.Tensor, x, 2)
    assert value(aten.clone.default, x).stride() == (3, 1) and value(aten.clone.default, z).stride() == (1, 2)
    assert [value(aten._assert_async.default, one) for one in (x, y)] == [None, None]
    assert value(aten.add_.Tensor, x, 1) is x.meta["val"] and value(aten.add_.Tensor, y, 1) is y.meta["val"]


def test_values_of_other_calls_differ(value):
    aten = torch.ops.aten
    numbers = placed(value, torch.arange(3))
    dtypes = [value(aten.add.Tensor, numbers, one).dtype for one in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64]
    x, y = placed(value, torch.arange(3)), placed(value, torch.arange(3))
    for operator in (aten.nonzero.default, aten.where.default):  # the second has no tag that says so
        counts = [pytree.tree_leaves(value(operator, one))[0].shape[0] for one in (x, y)]
        assert counts[0].node.expr != counts[1].node.expr
    chosen = value.graph.call_function(aten.nonzero.default, (x,))
    set_value(chosen)
    assert value(aten.add.Tensor, chosen, 1) is value(aten.add.Tensor, chosen, 1)
    constants = [value.graph.placeholder("constant") for _ in range(2)]
    for i, node in enumerate(constants):
        with value.mode:
            node.meta["val"] = torch.tensor(i)
    assert [value(aten.add.Tensor, node, 1).constant.item() for node in constants] == [1, 2]
