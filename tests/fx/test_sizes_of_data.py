"""Lowering of models with lengths that only the data decide: no pass and no operator may ask for their value."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pt2mx
from tests.flow import convert
from tests.models import Residual

WIDTH = 32


class Padded(nn.Module):
    """Layers over an input that is padded by as many positions as a buffer says, as in streaming decoders of audio."""

    def __init__(self, layers, rank):
        super().__init__()
        self.layers, self.rank = layers, rank
        self.register_buffer("count", torch.tensor(4))

    def forward(self, x):  # (B, WIDTH, length) for convolutions, (B, length, WIDTH) for the others
        count = self.count.item()
        return self.layers(F.pad(x, (2, count) if self.rank else (0, 0, 2, count)))


class Selected(nn.Module):
    """Layers over the positions whose first value is positive."""

    def __init__(self, layers, rank):
        super().__init__()
        self.layers, self.rank = layers, rank

    def forward(self, x):
        if self.rank:
            return self.layers(x[..., (x[0, 0].flatten()[: x.shape[-1]] > 0).nonzero().squeeze(1)])
        return self.layers(x[:, (x[0, :, 0] > 0).nonzero().squeeze(1)])


class Attention(nn.Module):
    """Attention by its formula: torch exports `scaled_dot_product_attention` for known lengths only."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


def conv(rank, **options):
    return (nn.Conv1d if rank == 1 else nn.Conv2d)(WIDTH, WIDTH, 3, **options)


def norm(rank):
    return (nn.BatchNorm1d if rank == 1 else nn.BatchNorm2d)(WIDTH)


#: name -> the rank of convolutions, 0 for other layers, and the layers
LAYERS = {
    "transposed": (1, lambda: [conv(1), nn.ELU(), nn.ConvTranspose1d(WIDTH, WIDTH, 4, 2), nn.ELU(), conv(1)]),
    "strides": (1, lambda: [conv(1, stride=2, padding=1), nn.ELU(), conv(1, dilation=2)]),
    "residual": (1, lambda: [conv(1), nn.ReLU(), Residual(conv(1, padding=1)), nn.ReLU(), conv(1)]),
    "images": (2, lambda: [conv(2), norm(2), nn.ReLU(), Residual(conv(2, padding=1)), nn.ReLU(), conv(2)]),
    "pooled images": (
        2,
        lambda: [conv(2), nn.GELU(), nn.MaxPool2d(2), Residual(conv(2, padding=1)), conv(2)],
    ),
    "linear": (0, lambda: [nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)]),
    "attention": (
        0,
        lambda: [Residual(nn.LayerNorm(WIDTH), Attention()), nn.LayerNorm(WIDTH), Attention()],
    ),
}


@pytest.mark.compiled_except("mxfp4-attention-Selected", "mxfp8-images-Padded")
@pytest.mark.slow_except("mxfp8-transposed-Padded", "mxfp8-images-Padded", "mxfp4-attention-Selected")
@pytest.mark.parametrize("kind", [Padded, Selected])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp6", "mxfp4"])
def test_lowers_lengths_that_the_data_decide(kind, name, recipe):
    rank, layers = LAYERS[name]
    shape = (1, 20, WIDTH) if rank == 0 else (1, WIDTH, *(20,) * rank)
    x = torch.randn(*shape) + 1
    converted = convert(kind(nn.Sequential(*layers()), rank), (x,), recipe)
    lowered = pt2mx.lower_to_inductor(converted)
    for seed in range(2):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 1
        for model in (converted, lowered) if kind is Padded else ():
            model.get_buffer("count").fill_(3 + seed)
        torch.testing.assert_close(lowered(x), converted(x), rtol=1e-2, atol=1e-2)
