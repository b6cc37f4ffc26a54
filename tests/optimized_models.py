"""A small model to optimize, and shared checks of the result."""

import torch
from torch import nn

import pt2mx
from pt2mx import get_default_mx_quantization_config

W4 = get_default_mx_quantization_config(weight="mxfp4", activation=None)


def exported(model, *args, **kwargs):
    return torch.export.export(model.eval(), args, kwargs).module()


def correlated(*shape):
    mixing = torch.randn(shape[-1], shape[-1], generator=torch.Generator().manual_seed(1)) / shape[-1] ** 0.5
    return torch.randn(shape) @ mixing


def quantized(graph, quantizer):
    return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(graph, quantizer))


def rows(model):
    return {row.weight: row for row in pt2mx.optimization_report(model).weights}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


def net():
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (8, 16))
    return exported(Net(), ids), [(torch.randint(0, 50, (8, 16)),) for _ in range(4)], ids
