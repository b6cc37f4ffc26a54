import copy

import pytest
import torch
from torch import Tensor, nn

import pt2mx
from pt2mx.fx.graph.aliasing import written_nodes, written_storages
from pt2mx.fx.graph.constants import constant_nodes
from tests.compare import sqnr
from tests.models import module_of

aten = torch.ops.aten
MXFP8 = pt2mx.get_default_mx_quantization_config("mxfp8", "mxfp8")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8))
        self.register_buffer("zero", torch.zeros(()))

    def forward(self, x, y):
        h = x * 2
        h[:, :4].fill_(self.zero)
        self.cache[1:3] = y[1:3]
        first, _ = y.t().split(4)
        return h + 1, self.cache.t() @ y, first


def test_views_splits_and_writes():
    model = torch.export.export(Model(), (torch.randn(4, 8), torch.randn(4, 8))).module()
    written = written_nodes(model.graph)
    multiplied = next(n for n in model.graph.nodes if n.target is aten.mul.Tensor)
    cache = next(n for n in model.graph.nodes if n.target == "cache")
    assert {multiplied, cache} < written
    assert all(any(n in written for n in (node, *node.all_input_nodes)) for node in written)
    assert not {n.name for n in written} & {"x", "y", "split", "add"}


def test_equal_operands_of_a_loaded_program_are_no_aliases(tmp_path):
    """Their fake tensors share memory, and `type_as` may return its first argument."""

    def forward(self, x):
        first, second = self.first(x), self.second(x)
        return second * first.type_as(second).add_(1)

    model = module_of(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    program = torch.export.export(model, (torch.randn(3, 4),))
    pt2mx.save_program(program, tmp_path / "net.pt2")
    for one in (program, pt2mx.load_program(tmp_path / "net.pt2")):
        names = {node.name for node in written_nodes(one.module().graph)}
        assert names == {"linear", "type_as", "add_"}


def test_dropout_in_place_writes_in_training_alone():
    for kind in (nn.Dropout, nn.Dropout2d):
        for training in (False, True):
            model = nn.Sequential(nn.ReLU(), kind(0.5, inplace=True)).train(training)
            graph = torch.export.export(model, (torch.randn(2, 3, 4, 4),)).module().graph
            assert bool(written_nodes(graph)) == training


@torch.library.custom_op("pt2mx_tests::double_list", mutates_args=("tensors",))
def double_list(x: Tensor, tensors: list[Tensor]) -> Tensor:
    for tensor in tensors:
        tensor.mul_(2)
    return x.clone()


@torch.library.custom_op("pt2mx_tests::double_named", mutates_args=("out",))
def double_named(x: Tensor, out: Tensor | None = None, scale: float = 2.0) -> Tensor:
    out.mul_(scale)
    return x.clone()


@double_list.register_fake
@double_named.register_fake
def _(x, *args, **kwargs):
    return torch.empty_like(x)


def in_no_grad(x):
    with torch.no_grad():
        x.mul_(2)


def through_view_in_no_grad(x):
    with torch.no_grad():
        rows = x.view(-1)
    rows.mul_(2)


def slices_in_no_grad(x):
    with torch.no_grad():
        x[:2].mul_(2)
        x[2:] = x[2:] * 2


def foreach_in_no_grad(x):
    with torch.no_grad():
        torch._foreach_mul_([x], 2)


def view_in_autocast(x):
    with torch.autocast("cpu", enabled=False):
        x.view(-1).mul_(2)


def index_copy_in_no_grad_twice(x):
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        x.view(-1).index_copy_(0, torch.arange(256), x.flatten() * 2)


#: every way in which a graph can write to a tensor x (4, 64): each doubles it
WRITES = {
    "in place": lambda x: x.mul_(2),
    "a view": lambda x: x.view(-1).mul_(2),
    "a slice": lambda x: x[:, :].mul_(2),
    "assignment": lambda x: x.__setitem__(slice(None), x * 2),
    "copy_": lambda x: x.copy_(x * 2),
    "index_put_": lambda x: x.index_put_((torch.arange(4),), x.clone(), accumulate=True),
    "out": lambda x: torch.mul(x, 2, out=x),
    "a split": lambda x: [part.mul_(2) for part in x.split(16, 1)],
    "unbind": lambda x: [row.mul_(2) for row in x.unbind()],
    "foreach": lambda x: torch._foreach_mul_([x], 2),
    "foreach of views": lambda x: torch._foreach_mul_([x[:2], x[2:]], 2.0),
    "a custom operator's list": lambda x: double_list(x, [x]),
    "a custom operator's optional argument": lambda x: double_named(x, out=x),
    "no_grad": in_no_grad,
    "a view from no_grad": through_view_in_no_grad,
    "slices in no_grad": slices_in_no_grad,
    "foreach in no_grad": foreach_in_no_grad,
    "a view in autocast": view_in_autocast,
    "index_copy_ in two regions": index_copy_in_no_grad_twice,
    "dropout in evaluation": lambda x: nn.functional.dropout(x, 0.5, False).mul_(2),
    "einsum of one tensor": lambda x: torch.einsum("ij->ij", x).mul_(2),
    "a transposing einsum": lambda x: torch.einsum("ij->ji", x).mul_(2),
    "atleast_2d": lambda x: torch.atleast_2d(x).mul_(2),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x.detach())[0].mul_(2),
    "type_as": lambda x: x.type_as(x.clone()).mul_(2),
    "to its own dtype": lambda x: x.to(torch.float32).mul_(2),
    "contiguous": lambda x: x.contiguous().mul_(2),
    "reshape": lambda x: x.reshape(8, 32).mul_(2),
    "chunk and movedim": lambda x: torch.movedim(x.chunk(1, 1)[0], 0, 1).mul_(2),
    "as_strided": lambda x: x.as_strided((64, 4), (1, 64)).mul_(2),
}


class Written(nn.Module):
    """A weight that is written before it is used, and read under another name; an activation that a matmul reads
    before and after it is written."""

    def __init__(self, write):
        super().__init__()
        self.write, self.first, self.second = write, nn.Linear(64, 64), nn.Linear(64, 32)
        self.register_buffer("cache", torch.randn(4, 64))
        self.register_buffer("part", self.cache[0:3])
        self.register_buffer("apart", torch.randn(4, 64))

    def forward(self, x):
        h = x + 1
        outputs = [self.first(h)]
        self.write(h)
        self.write(self.cache)
        return [*outputs, self.second(h), *(nn.functional.linear(x, w) for w in (self.cache, self.part, self.apart))]


def differing(got, want, same=torch.equal):
    """Return the ways to write whose outputs differ."""
    return [name for name in WRITES if not all(map(same, got[name], want[name]))]


@pytest.mark.compiled
def test_every_way_to_write():
    every = module_of(
        lambda self, x: {name: module(x) for name, module in zip(WRITES, self.each, strict=True)},
        each=nn.ModuleList(map(Written, WRITES.values())),
    )
    model, x = every, torch.randn(4, 64)
    exported = torch.export.export(copy.deepcopy(model), (x,)).module()
    constants = {n.target for n in constant_nodes(exported.graph)}
    for i, name in enumerate(WRITES):
        names = {n.target for n in exported.graph.find_nodes(op="get_attr") if n.target.startswith(f"each.{i}.")}
        assert names - constants == {f"each.{i}.cache", f"each.{i}.part"}, name
    assert len(written_storages(exported)) == len(WRITES)

    quantizer = pt2mx.MXQuantizer().set_global(MXFP8)
    prepared, fake = pt2mx.prepare_pt2e(exported, quantizer), pt2mx.prepare_pt2e(exported, quantizer)
    pt2mx.enable_fake_quant(fake)
    pt2mx.disable_observer(fake)
    with torch.no_grad():
        want = copy.deepcopy(model)(x)
        assert not differing(prepared(x), want), "observers change nothing"
        converted = pt2mx.convert_pt2e(prepared)  # calibration has written the buffers
        lowered = pt2mx.lower_to_inductor(converted)
        reloaded = torch.export.export(copy.deepcopy(converted), (x,)).module()
        first = quantized = copy.deepcopy(fake(x))
        assert not differing(first, want, lambda a, b: sqnr(a, b) > 20)
        for call in range(2):
            assert not differing(converted(x), quantized), call
            assert not differing(reloaded(x), quantized), call
            assert not differing(lowered(x), quantized, lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-4)), call
            quantized = copy.deepcopy(fake(x))
    state = exported.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_what_writes_nothing_needs_no_analysis():
    model = torch.export.export(nn.Sequential(nn.Linear(64, 64), nn.Dropout()).eval(), (torch.randn(2, 64),)).module()
    assert written_nodes(model.graph) == set() and written_storages(model) == set()


def test_running_statistics_are_written_in_training():
    for norm in (nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)):
        for training in (True, False):
            model = torch.export.export(norm.train(training), (torch.randn(4, 8, 16),)).module()
            written = {n.target for n in written_nodes(model.graph) if n.op == "get_attr"}
            assert ("running_mean" in written) == ("running_var" in written) == training


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.randn(3, 4))

    def forward(self, x):
        y = x @ self.cache.t()
        with torch.no_grad():
            self.cache.copy_(x)
        return y


def test_a_graph_inside_writes_its_operands():
    model = torch.export.export(Cache(), (torch.randn(3, 4),)).module()
    assert any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in model.graph.nodes)
    assert "cache" in {node.target for node in written_nodes(model.graph)}
    assert "cache" not in {node.target for node in constant_nodes(model.graph)}


def names_written(model):
    return {node.name for node in written_nodes(model.graph)}


def test_each_change_of_a_graph_counts():
    """A pass changes arguments, operators and buffers one at a time, and asks after each change."""
    model = torch.export.export(Model(), (torch.randn(4, 8), torch.randn(4, 8))).module()
    nodes = {node.name: node for node in model.graph.nodes}
    filled = {"mul", "slice_1", "fill_"}
    assert names_written(model) == filled | {"cache", "slice_3", "copy_", "t_1"}
    nodes["copy_"].args = nodes["slice_2"], nodes["slice_3"]
    assert names_written(model) == filled | {"y", "slice_2", "copy_", "t", "split", "getitem", "getitem_1"}
    nodes["slice_2"].target = aten.slice_copy.Tensor
    assert names_written(model) == filled | {"slice_2", "copy_"}
    nodes["slice_2"].replace_all_uses_with(nodes["slice_3"])
    assert names_written(model) == filled | {"cache", "slice_3", "copy_", "t_1"}
    model.zero = model.cache[0, 0]
    assert names_written(model) == filled | {"cache", "slice_3", "copy_", "t_1", "zero"}
    nodes["fill_"].target = aten.fill.Tensor
    model.graph.erase_node(nodes["copy_"])
    assert names_written(model) == set()


def test_a_change_of_a_subgraph_counts():
    model = torch.export.export(Cache(), (torch.randn(3, 4),)).module()
    assert names_written(model) == {"cache", "t"}
    (write,) = model.submod_1.graph.find_nodes(op="call_function", target=aten.copy_.default)
    write.target = aten.copy.default
    assert names_written(model) == set()


def test_a_change_of_a_value_counts():
    """A composite operator returns its input, or a new tensor, by the input's dtype."""
    cast = module_of(lambda self, x, y: (x * 2).type_as(y).add_(1))
    model = torch.export.export(cast, (torch.randn(4, 4), torch.randn(4))).module()
    assert names_written(model) == {"mul", "type_as", "add_"}
    (doubled,) = model.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    doubled.meta["val"] = doubled.meta["val"].half()
    assert names_written(model) == {"type_as", "add_"}
