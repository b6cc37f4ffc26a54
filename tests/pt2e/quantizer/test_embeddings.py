import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pt2mx import MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.quantizer.operators import operator_name
from tests.models import chain, module_of, tied
from tests.quantized_by_hand import BOTH, A, W, a, w


@pytest.mark.parametrize("offsets", [False, True])
def test_embedding_bag_rows(offsets, quantize):
    def forward(self, ids):
        if offsets:  # the overload without padding
            return torch.ops.aten.embedding_bag(self.bag.weight, ids.reshape(-1), torch.tensor([0, 5]), False, 1)[0]
        return self.bag(ids)

    net = module_of(forward, bag=nn.EmbeddingBag(50, 40, mode="mean", padding_idx=None if offsets else 3))
    model, inputs = net.eval(), (torch.randint(50, (2, 5)),)
    exported = torch.export.export(model, inputs)
    overload = "aten.embedding_bag" + ("" if offsets else ".padding_idx")
    assert overload in {operator_name(node.target) for node in exported.graph.nodes}
    prepared, _, converted = quantize(exported, MXQuantizer().set_global(MXQuantizationConfig(weight=W)), inputs)
    with torch.no_grad():
        model.bag.weight.copy_(w(model.bag.weight, -1))
        assert torch.equal(converted(*inputs), prepared) and torch.equal(prepared, model(*inputs))
    assert "bag.weight_data" in converted.state_dict() and "bag.weight" not in converted.state_dict()


def test_embedding_rows(quantize):
    model = nn.Sequential(nn.Embedding(50, 40, padding_idx=3)).eval()
    inputs = (torch.randint(50, (2, 5)),)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(weight=W))
    prepared, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    assert torch.equal(converted(*inputs), prepared)
    assert torch.equal(converted(*inputs), F.embedding(inputs[0], w(model[0].weight, -1)))
    assert set(converted.state_dict()) == {"0.weight_data", "0.weight_scale"}


def test_tied_embedding_and_head_are_one_packed_copy(quantize):
    model = tied(chain(embedding=nn.Embedding(50, 40), head=nn.Linear(40, 50, bias=False)), "embedding", "head")
    inputs = (torch.randint(50, (2, 5)),)
    exported = torch.export.export(model.eval(), inputs)
    prepared, _, converted = quantize(exported, BOTH, inputs)
    with torch.no_grad():
        table = w(model.head.weight, -1)
        assert torch.equal(converted(*inputs), F.linear(a(F.embedding(inputs[0], table), -1), table))
        assert torch.equal(converted(*inputs), prepared)
    assert len(converted.state_dict()) == 2
    other = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W))
    other.set_module_name("head", MXQuantizationConfig(activation=A, weight="mxint8"))
    prepared, _, converted = quantize(exported, other, inputs)
    assert len(converted.state_dict()) == 4 and torch.equal(converted(*inputs), prepared)
