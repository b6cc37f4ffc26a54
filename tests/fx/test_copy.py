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
