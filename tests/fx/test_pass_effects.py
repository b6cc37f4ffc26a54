"""The passes that change each model of a table, and a check that skipped passes would change nothing."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2mx import lower_to_inductor
from pt2mx.fx.graph.graph_pass import GraphPass
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.passes import (
    fuse_activation_quantize,
)
from pt2mx.kernels import select
from pt2mx.kernels.cpu import uses
from tests.flow import convert
from tests.models import Attention, Residual, module_of


def attention():
    return nn.Sequential(Residual(Attention(64, heads=2)), nn.LayerNorm(64))


class Decoder(nn.Module):
    """The step of a token with a cache that the graph writes, a gated MLP, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Embedding(96, 64), attention()
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        self.register_buffer("cache", torch.zeros(2, 8, 64))

    def forward(self, ids):
        self.cache[:, : ids.shape[1]] = self.embed(ids)
        x = self.attention(self.cache)
        return F.linear(x + self.down(F.silu(self.gate(x)) * self.up(x)), self.embed.weight)


def recurrent():
    lstm = nn.LSTM(32, 32, batch_first=True)
    return module_of(lambda self, x: self.head(self.lstm(x)[0]), lstm=lstm, head=nn.Linear(32, 8))


def branches():
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x) * 2, (x,))

    return module_of(forward, a=nn.Linear(64, 64), b=nn.Linear(64, 64))


MODELS = {
    "linear": (lambda: nn.Linear(64, 32), torch.randn(8, 64)),
    "many rows": (lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(64, 64)),
    "conv, batch norm, relu": (
        lambda: nn.Sequential(nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 1)),
        torch.randn(2, 32, 8, 8),
    ),
    "attention": (attention, torch.randn(2, 8, 64)),
    "lstm": (recurrent, torch.randn(2, 5, 32)),
    "decoder": (Decoder, torch.randint(96, (2, 4))),
    "cond": (branches, torch.randn(8, 64)),
}

#: model -> the passes that change its operators, in the order of the lowering
EFFECTS = {
    "linear": "fuse_qdq use_packed_weights fuse_activation_quantize",
    "many rows": "fuse_qdq use_packed_weights use_bf16_matmul fuse_activation_quantize fuse_quantize_epilogue",
    "conv, batch norm, relu": "fuse_qdq use_matmuls_for_convolutions fuse_quantize_epilogue",
    "attention": "fuse_qdq use_packed_weights merge_linears merge_fake_quantize fuse_activation_quantize",
    "lstm": "fuse_qdq use_packed_weights fuse_activation_quantize",
    "decoder": "fuse_qdq use_packed_embeddings use_packed_weights merge_linears sink_bias fuse_activation_quantize",
    "cond": "fuse_qdq use_packed_weights fuse_activation_quantize",
}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A CPU with matrix instructions for bfloat16, on any test machine."""
    monkeypatch.setattr(uses, "isa_for", lambda spec, k: 4)
    monkeypatch.setattr(uses.bf16_matmul, "bf16_isa", lambda: 4)
    monkeypatch.setattr(uses, "MIN_MULTIPLIES", 1)
    monkeypatch.setattr(fuse_activation_quantize, "_MIN_VALUES", 1)
    monkeypatch.setitem(select._RUNS, "cpu", lambda device: True)


def lowered(name):
    model, x = MODELS[name]
    torch.manual_seed(0)
    return lower_to_inductor(convert(model(), (x,)))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm._flat_weights")  # export's
@pytest.mark.parametrize("name", MODELS)
def test_passes_and_what_they_change(name, monkeypatch, capsys):
    monkeypatch.setenv("PT2MX_LOG", "passes")
    lowered(name)
    changes = [line.removeprefix("pt2mx: ").split(": ") for line in capsys.readouterr().err.splitlines()]
    assert list(dict.fromkeys(name for name, change in changes if change != "no operator")) == EFFECTS[name].split()


@pytest.mark.compiled_cases("decoder", "many rows")
@pytest.mark.filterwarnings("ignore:The tensor attributes self.lstm._flat_weights")  # export's
@pytest.mark.parametrize("name", MODELS)
def test_a_skipped_pass_changes_nothing(name, monkeypatch):
    model = lowered(name)
    monkeypatch.setattr(GraphPass, "applies_to", lambda self, model: True)
    every_pass = lowered(name)
    codes, all_codes = ([graph.code for graph in graph_modules(m)] for m in (model, every_pass))
    assert codes == all_codes
