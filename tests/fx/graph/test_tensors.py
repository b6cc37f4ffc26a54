import torch
from torch import nn

from pt2mx.fx.graph.tensors import copy_sharing_tensors, map_tensors


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


class Cache(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(3, 4))

    def forward(self, x):
        self.cache.copy_(self.linear(x))
        return x @ self.cache.t()


def test_a_buffer_with_a_gradient_is_copied_without_it():
    x = torch.randn(3, 4)
    model = torch.export.export(Cache(), (x,)).module()
    want = model(x)
    assert model.cache.requires_grad
    copied = copy_sharing_tensors(model)
    assert torch.equal(copied.cache, model.cache) and not copied.cache.requires_grad
    copied(2 * x)
    assert torch.equal(model.cache @ x.t(), want.t())


class Shared(torch.nn.Module):
    """A buffer, a part of it and its real and imaginary parts are one memory, which is written; a weight is tied."""

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
