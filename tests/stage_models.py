"""Models, and their forms through the flow."""

import pytest
import torch
from torch import nn

import pt2mx

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
    """Return the exported model, and its forms by name."""
    torch.manual_seed(0)
    model = (model or Net()).eval()
    exported = torch.export.export(model, example).module()
    config = pt2mx.get_default_mx_quantization_config(weight=weight, activation=activation)
    prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer().set_global(config))
    with torch.no_grad():
        prepared(*example)
    converted = pt2mx.convert_pt2e(prepared)
    return exported, {"prepared": prepared, "converted": converted, "lowered": pt2mx.lower_to_inductor(converted)}


class Normalized(nn.Module):
    """A convolution whose batch norm is folded, an activation that writes into its input, and a GRU."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
        self.gru, self.head = nn.GRU(64, 64, batch_first=True), nn.Linear(64, 8)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):  # (B, 32, 10, 10) -> (B, 32, 8)
        x = self.relu(self.norm(self.conv(x)))
        return self.head(self.gru(x.flatten(2))[0])


GRU = pytest.mark.filterwarnings("ignore:The tensor attributes self.gru._flat_weights")  # export's
