import torch
from torch import nn

from pt2mx.fx.own_tensors import own_tensors


def test_every_tensor_is_replaced_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own_tensors(model, torch.clone)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor is not before[name] and torch.equal(tensor, before[name]) and not tensor.requires_grad
        assert type(tensor) is type(before[name])
    assert model[2].weight is model[0].weight and model[2].bias is None
    assert before["0.weight"].requires_grad
