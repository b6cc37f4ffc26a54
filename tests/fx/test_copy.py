import torch

from pt2mx.fx.copy import copy_sharing_tensors


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
