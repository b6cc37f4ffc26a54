import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import lower_to_inductor, ops
from pt2mx.kernels.select import USES
from pt2mx.ops import linear
from tests.flow import convert
from tests.graph import count
from tests.models import BATCH, IDS, Tied, module_of
from tests.subgraph_models import QUANTIZER, Cond, X

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def without_bfloat16_instructions(monkeypatch):
    """Weights that bfloat16 instructions multiply stay packed."""
    for use in ("multiply by packed weights", "convolve packed weights"):
        monkeypatch.setitem(USES, use, {})


def vision(self, x):
    x = self.conv(torch.relu(self.stem(x)))
    return self.head(self.conv1d(x.view(x.shape[0], 64, -1)).mean(2))


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_weight_only"])
def test_before_and_after(recipe):
    converted = convert(Tied(), (IDS,), recipe, shapes=BATCH)
    lowered = lower_to_inductor(converted, unpack=True)
    assert torch.allclose(lowered(IDS), converted(IDS), rtol=1e-5, atol=1e-4)
    assert count(lowered, linear.linear_mx) == 0 and count(lowered, aten.linear.default) == 3
    assert count(lowered, ops.dequantize_mx) == 1  # of gathered rows
    held = lowered.state_dict()
    assert {n for n in held if n.endswith("_unpacked")} == {
        "head.weight_data_unpacked", "query.weight_data_joined_unpacked", "up_data_t_unpacked"
    }  # fmt: skip
    assert {n for n, t in held.items() if t.dtype == torch.uint8} == {"head.weight_data", "head.weight_scale"}
    for node in lowered.graph.find_nodes(op="call_function", target=aten.linear.default):
        assert node.meta["val"].shape[:2] == (node.args[0].meta["val"].shape[0], 4)


@pytest.mark.compiled
@pytest.mark.usefixtures("compiler")
def test_convolutions():
    torch.manual_seed(0)
    net = module_of(
        vision, stem=nn.Conv2d(3, 32, 3), conv=nn.Conv2d(32, 64, 3), conv1d=nn.Conv1d(64, 64, 3), head=nn.Linear(64, 10)
    )
    model, x = net, torch.randn(2, 3, 12, 12)
    converted = convert(model, (x,))
    lowered = lower_to_inductor(converted, unpack=True)
    assert torch.equal(lowered(x), converted(x))
    weights = {n: t for n, t in lowered.state_dict().items() if n.endswith("_unpacked")}
    assert [tuple(t.shape) for t in weights.values()] == [(32, 3, 3, 3), (64, 32, 3, 3), (64, 64, 3), (10, 64)]
    with torch.no_grad():
        assert torch.allclose(torch.compile(lowered, fullgraph=True)(x), converted(x), rtol=1e-2, atol=1e-2)
    again = torch.export.export(lowered, (x,)).module()
    assert torch.equal(again(x), converted(x))


def test_weights_that_a_graph_inside_reads_stay_packed(quantize):
    _, _, converted = quantize(torch.export.export(Cond().eval(), (X,)), QUANTIZER, (X,))
    lowered = lower_to_inductor(converted, unpack=True)
    with torch.no_grad():
        assert torch.allclose(lowered(X), converted(X), rtol=1e-5, atol=1e-5)
    assert any(t.dtype == torch.uint8 for t in lowered.state_dict().values())


def test_a_weight_that_several_read_is_unpacked_once():
    x = torch.randn(3, 64)
    converted = convert(module_of(lambda self, x: self.fc(torch.relu(self.fc(x))), fc=nn.Linear(64, 64)), (x,))
    lowered = pt2mx.lower_to_inductor(converted, unpack=True)
    assert torch.equal(lowered(x), converted(x)) and sum(n.endswith("_unpacked") for n in lowered.state_dict()) == 1


def test_one_buffer_however_a_call_is_written():
    scale, data = ops.quantize_mx(torch.randn(8, 64), "fp8_e4m3", 32, -1, "floor", "even")

    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("data", data)
            self.register_buffer("scale", scale)

        def forward(self, x):
            a = ops.dequantize_mx(self.data, self.scale, "fp8_e4m3", 32, torch.float32, -1)
            b = ops.dequantize_mx(self.data, self.scale, "fp8_e4m3", 32, torch.float32, block_dim=1, length=64)
            c = ops.dequantize_mx(self.data, self.scale, "fp8_e4m3", 32, torch.bfloat16, -1)
            return (x + a - b) * c

    model, x = torch.export.export(Same(), (torch.randn(8, 64),)).module(), torch.randn(8, 64)
    lowered = lower_to_inductor(model, unpack=True)
    assert torch.equal(lowered(x), model(x))
    assert sum(n.endswith("_unpacked") or "_unpacked_" in n for n in lowered.state_dict()) == 2


def test_matmuls_without_a_known_shape_stay_packed():
    x = torch.randn(3, 64)
    lowered = lower_to_inductor(convert(nn.Sequential(nn.Linear(64, 32)), (x,)))
    without_values = torch.fx.symbolic_trace(lowered)
    again = lower_to_inductor(without_values, unpack=True)
    assert torch.equal(again(x), lowered(x)) and count(again, linear.linear_mx) == 1
