import pytest
import torch
from torch import nn
from torch.fx import graph_module

from pt2mx import convert_pt2e, prepare_pt2e
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.tensors import (
    cast_floats,
    copy_sharing_tensors,
    floats_in,
    generate_code,
    map_tensors,
    move_to_device,
)
from pt2mx.pt2e.program.build_program import program_of
from tests.models import module_of
from tests.subgraph_models import QUANTIZER, Base, Cond

META = torch.device("meta")


def test_copy_shares_tensors_and_nothing_else():
    model = torch.export.export(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).eval(),
                                (torch.randn(2, 4),)).module()  # fmt: skip
    code, names = model.code, sorted(model.state_dict())
    copied = copy_sharing_tensors(model)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), copied.buffers(), strict=True))
    for node in reversed(copied.graph.nodes):
        node.meta.clear()
    delattr(copied.get_submodule("0"), "weight")
    copied.get_submodule("0").bias = torch.nn.Parameter(torch.zeros(4))
    assert model.code == code and sorted(model.state_dict()) == names
    assert all("val" in n.meta for n in model.graph.nodes if n.op == "call_function" and "batch" in n.name)
    assert model.get_submodule("0").bias is not copied.get_submodule("0").bias


def cache(self, x):
    self.cache.copy_(self.linear(x))
    return x @ self.cache.t()


def test_a_buffer_with_a_gradient_is_copied_without_it():
    x = torch.randn(3, 4)
    net = module_of(cache, linear=torch.nn.Linear(4, 4), cache=nn.Buffer(torch.zeros(3, 4)))
    model = torch.export.export(net, (x,)).module()
    want = model(x)
    assert model.cache.requires_grad
    copied = copy_sharing_tensors(model)
    assert torch.equal(copied.cache, model.cache) and not copied.cache.requires_grad
    copied(2 * x)
    assert torch.equal(model.cache @ x.t(), want.t())


class Shared(torch.nn.Module):
    """A buffer, its slice and its real and imaginary parts share memory, which the model writes; a weight is tied."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.randn(3, 4, 2))
        self.register_buffer("row", self.cache[1].t())
        self.register_buffer("complex", torch.view_as_complex(self.cache))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        self.cache.add_(1)
        return self.row * x[0, 0], self.complex.real * 1, self.second(self.first(x))


def test_copies_of_shared_memory_share_memory():
    x = torch.randn(2, 4)
    model = torch.export.export(Shared(), (x,)).module()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = copy_sharing_tensors(model)
    owned = copy_sharing_tensors(model)
    map_tensors(owned, torch.Tensor.clone)
    for other in (copied, owned):
        with torch.no_grad():
            other(x)
        assert torch.equal(other.cache, before["cache"] + 1)
        assert torch.equal(other.row, other.cache[1].t())
        assert torch.equal(torch.view_as_real(other.complex), other.cache)
        assert other.second.weight is other.first.weight
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert copied.first.weight is model.first.weight
    assert owned.first.weight is not model.first.weight and not owned.first.weight.requires_grad
    assert model.first.weight.requires_grad


def test_tensors_and_what_the_graph_names_move():
    def forward(self, x):
        positions = torch.arange(4, device=x.device).to(torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16):
            y = self.fc(x)
        y = torch.cond(x.sum() > 0, lambda x: x + torch.ones(4), lambda x: x - 1, (y.float(),))
        return y + positions + self.offset + torch.full((4,), 2.0) + torch.tensor([1.0, 2, 3, 4])

    factories = module_of(forward, fc=nn.Linear(4, 4), offset=nn.Buffer(torch.ones(4)))
    with torch.no_grad():
        model = torch.export.export(factories, (torch.randn(2, 4),)).module()
    parameters = dict(model.named_parameters())
    moved = move_to_device(model, META)
    assert moved is model
    assert {t.device for t in [*model.parameters(), *model.buffers()]} == {META}
    assert all(p.device.type == "cpu" for p in parameters.values()), "the tensors themselves stay where they are"
    assert isinstance(model.fc.weight, nn.Parameter) and not model.fc.weight.requires_grad
    assert len(graph_modules(model)) > 2
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            assert not isinstance(value, torch.Tensor) or value.device == META, node
            assert torch.device("cpu") not in (*node.args, *node.kwargs.values()), node
    (autocast,) = model.graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_autocast)
    assert autocast.args[0] == "meta"


def test_a_moved_program_runs_there():
    plain = module_of(lambda self, x: x + torch.arange(4) + torch.full((4,), 2.0, device="cpu"))
    model = move_to_device(torch.export.export(plain, (torch.randn(2, 4),)).module(), META)
    assert model(torch.randn(2, 4, device=META)).device == META


X = torch.randn(4, 64)


class Plain(Base):
    def apply_inner(self, x):
        return torch.relu(self.inner(x))


@pytest.fixture
def generated(monkeypatch):
    """The code of operators that is generated after this."""
    sources = []
    of_source = graph_module._forward_from_src

    def recorded(source, *args):
        if "torch.ops" in source:
            sources.append(source)
        return of_source(source, *args)

    monkeypatch.setattr(graph_module, "_forward_from_src", recorded)
    return sources


@pytest.mark.parametrize("model", [Plain(), Cond()])
def test_a_copy_gets_code_at_the_end(model, generated):
    exported = torch.export.export(model, (X,)).module()
    code = exported.code
    generated.clear()
    copied = copy_sharing_tensors(exported, delays_code=True)
    copied.recompile()
    assert generated == []
    assert generate_code(copied) is copied
    assert len(generated) == (1 if isinstance(model, Plain) else 5)  # torch.fx generates that of subgraphs twice
    assert copied.code == exported.code == code
    assert torch.equal(copied(X), exported(X))


def test_a_graph_without_tensors_is_copied():
    exported = torch.export.export(torch.nn.ReLU(), (X,)).module()
    copied = generate_code(copy_sharing_tensors(exported, delays_code=True))
    assert copied.code == exported.code and torch.equal(copied(X), X.relu())


def test_the_flow_generates_code_once_a_graph(generated):
    program = torch.export.export(Plain(), (X,))
    exported = program.module()
    generated.clear()
    prepared = prepare_pt2e(exported, QUANTIZER)
    assert generated == [prepared.code]
    prepared(X)
    converted = convert_pt2e(prepared)
    assert generated == [prepared.code, converted.code]
    assert torch.equal(program_of(converted, program).module()(X), converted(X))


def test_changes_of_torch_cost_time_alone(monkeypatch, generated):
    """A torch that generates code in another way does so after each change."""
    monkeypatch.delattr("pt2mx.fx.graph.tensors._NoCode._gen_python_code")
    exported = torch.export.export(Plain(), (X,)).module()
    generated.clear()
    prepared = prepare_pt2e(exported, QUANTIZER)
    assert len(generated) > 1 and generated[-1] == prepared.code


class Masked(nn.Module):
    """Casts, factories, a mask of the smallest number, an integer buffer, and a weight in another float dtype."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("scale", torch.ones(4, dtype=torch.float16))

    def forward(self, x):
        scores = self.fc(x).float() * torch.full((4,), 2.0) + torch.zeros(4, dtype=torch.float32)
        scores = scores.masked_fill(self.index > 2, torch.finfo(torch.float32).min) * self.scale.to(torch.float32)
        return torch.cond(x.sum() > 0, lambda y: y + torch.ones(4), lambda y: y - 1, (scores.softmax(-1),))


def test_a_float_model_in_another_dtype_is_the_module_in_it():
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    with torch.no_grad():
        model = torch.export.export(Masked(), (x,)).module()
        expected = model(x)
        cast = cast_floats(copy_sharing_tensors(model), torch.bfloat16)
        actual = cast(floats_in(torch.bfloat16, x))
    assert actual.dtype == torch.bfloat16 and torch.allclose(actual.float(), expected, atol=0.02)
    assert (cast.fc.weight.dtype, cast.scale.dtype) == (torch.bfloat16, torch.bfloat16)
    assert cast.index.dtype == torch.int64 and model.fc.weight.dtype == torch.float32
    for graph in graph_modules(cast):
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            assert not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float16), node
    inputs = floats_in(torch.float32, {"x": x.half(), "ids": [torch.arange(2), 1.5]})
    assert (inputs["x"].dtype, inputs["ids"][0].dtype, inputs["ids"][1]) == (torch.float32, torch.int64, 1.5)
