"""Models that training changes: layers with a batch norm, and what computes otherwise in training."""

import copy

import torch
from torch import nn

from tests.models import module_of

#: name -> (the layer, its batch norm, the shape of its input)
NORMALIZED_LAYERS = {
    "conv1d": (nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8, 1e-3, 0.2), (4, 6, 9)),
    "conv1d without bias": (nn.Conv1d(6, 8, 3, bias=False), nn.BatchNorm1d(8), (4, 6, 9)),
    "conv2d": (nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8, 1e-2, 0.3), (4, 6, 8, 8)),
    "conv2d, padding same": (nn.Conv2d(6, 8, 3, padding="same", bias=False), nn.BatchNorm2d(8), (4, 6, 8, 8)),
    "conv2d, grouped": (nn.Conv2d(6, 9, 3, groups=3), nn.BatchNorm2d(9), (4, 6, 8, 8)),
    "conv2d, depthwise": (nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.BatchNorm2d(6), (4, 6, 8, 8)),
    "conv2d, not affine": (nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8, affine=False), (4, 6, 8, 8)),
    "conv3d": (nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4), (2, 3, 4, 4, 4)),
    "conv_transpose1d": (nn.ConvTranspose1d(6, 8, 3), nn.BatchNorm1d(8), (4, 6, 9)),
    "conv_transpose2d": (nn.ConvTranspose2d(6, 8, 3, 2), nn.BatchNorm2d(8), (4, 6, 8, 8)),
    "conv_transpose2d, grouped": (nn.ConvTranspose2d(6, 8, 3, groups=2, bias=False), nn.BatchNorm2d(8), (4, 6, 8, 8)),
    "conv_transpose3d": (nn.ConvTranspose3d(3, 4, 2), nn.BatchNorm3d(4), (2, 3, 4, 4, 4)),
    "linear": (nn.Linear(6, 8), nn.BatchNorm1d(8, 1e-3), (16, 6)),
    "linear without bias": (nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), (16, 6)),
}


def layer_and_norm(name):
    """(the two and an activation, with statistics and one channel that is scaled by zero; the inputs)."""
    layer, norm, shape = NORMALIZED_LAYERS[name]
    model = copy.deepcopy(nn.Sequential(layer, norm, nn.ReLU()))
    torch.manual_seed(0)
    norm = model[1]
    with torch.no_grad():
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 2)
        if norm.affine:
            norm.weight.normal_(1, 0.5)
            norm.bias.normal_()
            norm.weight[0] = 0.0
    return model, (torch.randn(shape),)


class Attention(nn.Module):
    """With dropout of its probabilities in training."""

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3 if self.training else 0.0)


class DropsView(nn.Module):
    """A layer whose result a dropout in place changes by a view, and two layers that read it before and after."""

    def __init__(self):
        super().__init__()
        self.first, self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        before = self.before(y)
        nn.functional.dropout(y.view(-1), 0.5, self.training, inplace=True)
        return before + self.after(y)


def stochastic_depth(self, x):
    """A residual layer that training leaves out of some rows, as torchvision's and timm's do."""
    y = self.layer(x)
    return x + (y * y.new_empty(len(y), 1).bernoulli_(0.7).div_(0.7) if self.training else y)


def norm_often(self, x):
    """One batch norm, called twice and once more in a subgraph."""
    y = self.norm(self.layer(x))
    with torch.no_grad():
        z = self.norm(x)
    return self.norm(y * 2) + z


class Recurrent(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(8, 8, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


#: with a training mode: name -> (the model, the shape of its input)
WITH_MODES = {
    "dropout": (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), (4, 8)),
    "dropout2d": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout2d(0.5)), (4, 4, 3, 3)),
    "dropout in place": (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3, inplace=True), nn.Linear(8, 8)), (4, 8)),
    "dropout2d in place": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Dropout2d(0.5, inplace=True)), (4, 4, 3, 3)),
    "dropout of a view": (DropsView(), (4, 8)),
    "stochastic depth": (module_of(stochastic_depth, layer=nn.Linear(8, 8)), (4, 8)),
    "alpha_dropout": (nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.2)), (4, 8)),
    "rrelu": (nn.Sequential(nn.Linear(8, 8), nn.RReLU()), (4, 8)),
    "rrelu in place": (nn.Sequential(nn.Linear(8, 8), nn.RReLU(inplace=True), nn.Linear(8, 8)), (4, 8)),
    "instance_norm": (nn.Sequential(nn.Conv1d(6, 8, 3), nn.InstanceNorm1d(8, track_running_stats=True)), (4, 6, 9)),
    "batch_norm": (nn.Sequential(nn.BatchNorm1d(8, 1e-3, 0.2), nn.Linear(8, 8)), (4, 8)),
    "batch_norm often": (module_of(norm_often, layer=nn.Linear(8, 8), norm=nn.BatchNorm1d(8)), (4, 8)),
    "attention": (Attention(), (2, 4, 8, 16)),
    "lstm": (Recurrent(nn.LSTM), (3, 5, 8)),
    "gru": (Recurrent(nn.GRU), (3, 5, 8)),
}


class InterruptedLoss:
    """A loss that counts its calls and is interrupted at one of them; at None at no call."""

    def __init__(self, loss, at):
        self.loss, self.at, self.calls = loss, at, 0

    def __call__(self, actual, expected):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.loss(actual, expected)


def random_adapters(model, seed=0):
    """Give the adapters of a model random updates, as after training; return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.02, generator=generator))
    return model
