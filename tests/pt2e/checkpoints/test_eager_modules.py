import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.pt2e.checkpoints.eager_modules import MXEmbedding, MXLinear, packed_layer
from pt2mx.pt2e.checkpoints.select_weights import LayerSpecs

FORMATS = ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2{16}", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8{48}"]


@pytest.mark.parametrize("weight", FORMATS)
@pytest.mark.parametrize("activation", [None, "mxfp8"])
@pytest.mark.parametrize("columns", [64, 70])
@torch.no_grad()
def test_linear(weight, activation, columns):
    linear = nn.Linear(columns, 24)
    specs = LayerSpecs(pt2mx.parse(weight), activation and pt2mx.parse(activation))
    packed = packed_layer(linear, specs)
    packed.pack(linear.weight)
    values, x = pt2mx.fake_quantize_mx(linear.weight, weight), torch.randn(2, 40, columns)
    assert torch.equal(packed.weight, values)
    seen = x if activation is None else pt2mx.fake_quantize_mx(x, activation)
    assert torch.equal(packed(x), nn.functional.linear(seen, values, linear.bias))
    one = packed(x[0, 0])  # sums in another order
    assert torch.allclose(one, packed(x)[0, 0], atol=1e-5)


@pytest.mark.parametrize("weight", FORMATS)
@torch.no_grad()
def test_embedding(weight):
    embedding = nn.Embedding(30, 70, padding_idx=3)
    packed = packed_layer(embedding, LayerSpecs(pt2mx.parse(weight)))
    packed.pack(embedding.weight)
    ids = torch.randint(30, (2, 3, 5))
    assert isinstance(packed, MXEmbedding)
    assert (packed.num_embeddings, packed.embedding_dim, packed.padding_idx) == (30, 70, 3)
    assert torch.equal(packed(ids), nn.functional.embedding(ids, pt2mx.fake_quantize_mx(embedding.weight, weight)))


@torch.no_grad()
def test_a_layer_follows_its_model():
    packed = packed_layer(nn.Linear(64, 8), LayerSpecs(pt2mx.parse("mxfp4")))
    packed.pack(torch.randn(8, 64))
    codes = packed.weight_packed
    half = nn.Sequential(packed).half()
    assert half(torch.randn(3, 64).half()).dtype == half[0].weight.dtype == torch.float16
    assert half[0].weight_packed is codes and packed.bias.dtype == torch.float16
    state = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    assert set(state) == {"weight_packed", "weight_scale", "bias"}
    other = MXLinear(64, 8, LayerSpecs(pt2mx.parse("mxfp4")), nn.Parameter(torch.empty(8)), torch.float16)
    other.load_state_dict(state)
    assert torch.equal(other.weight, packed.weight)


def test_gradients_reach_the_input():
    packed = packed_layer(nn.Linear(64, 8), LayerSpecs(pt2mx.parse("mxfp4"), pt2mx.parse("mxfp8")))
    packed.pack(torch.randn(8, 64))
    x = torch.randn(3, 64, requires_grad=True)
    packed(x).sum().backward()
    assert torch.allclose(x.grad, packed.weight.sum(0).expand(3, -1), atol=1e-5)
    assert torch.equal(packed.bias.grad, torch.full((8,), 3.0))


@torch.no_grad()
def test_it_compiles_and_exports():
    packed = packed_layer(nn.Linear(64, 8), LayerSpecs(pt2mx.parse("mxfp4"), pt2mx.parse("mxfp8")))
    packed.pack(torch.randn(8, 64))
    x = torch.randn(40, 64)
    program = torch.export.export(packed, (x,))
    assert torch.equal(program.module()(x), packed(x))
    assert "pt2mx.linear_mx.default" in str(program.graph)
