from collections import OrderedDict

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, MXSpec, get_default_mx_quantization_config
from pt2mx.algorithms import LearnedRounding, gptq
from pt2mx.algorithms.learned_rounding import LatentWeight
from pt2mx.fx.graph.tensors import copy_sharing_tensors
from pt2mx.pt2e.optimize.learned_rounding import learn_rounding
from tests.models import Residual, module_of
from tests.optimized_models import quantized

FP4 = MXSpec("mxfp4", scale_mode="even")
W4 = MXQuantizer().set_global(get_default_mx_quantization_config(weight=FP4, activation=None))
W4A4 = MXQuantizer().set_global(get_default_mx_quantization_config(weight=FP4, activation=FP4))


def residual():
    return Residual(OrderedDict(up=nn.Linear(32, 64), relu=nn.ReLU(), down=nn.Linear(64, 32)))


def two_layers():
    layers = nn.Sequential(residual(), residual())
    return module_of(lambda self, x: self.head(self.layers(x)), layers=layers, head=nn.Linear(32, 8))


def net(model=None, dtype=torch.float32):
    """A graph, batches whose 32 columns depend on 6 numbers, and one more batch."""
    torch.manual_seed(0)
    mixing = torch.randn(6, 32) / 6**0.5
    batches = [(torch.randn(128, 6) @ mixing).to(dtype) for _ in range(9)]
    model = (model or two_layers()).to(dtype).eval()
    return torch.export.export(model, (batches[0],)).module(), batches[1:], batches[0]


def error(graph, quantizer, original, x):
    expected = original(x).float()
    return ((quantized(graph, quantizer)(x).float() - expected).square().sum() / expected.square().sum()).item()


def learned(graph, start, quantizer, batches, **options):
    copied = copy_sharing_tensors(start)
    return copied, learn_rounding(copied, graph, quantizer, batches, LearnedRounding(**options), {})


@pytest.mark.slow_except("W4A4")
@pytest.mark.parametrize(("quantizer", "less"), [(W4, 0.85), (W4A4, 0.92)], ids=["W4", "W4A4"])
def test_outputs_come_nearer_than_by_nearest_and_than_by_gptq(quantizer, less):
    graph, batches, x = net()
    for start in (graph, by_gptq(graph, batches)):
        before = {name: tensor.clone() for name, tensor in start.state_dict().items()}
        actual, blocks = learned(graph, start, quantizer, batches, steps=60)
        assert error(actual, quantizer, graph, x) < less * error(start, quantizer, graph, x)
        assert [block.name for block in blocks] == ["layers.0", "layers.1", ""]
        assert blocks[0].weights == ("layers.0.up.weight", "layers.0.down.weight")
        assert all(block.after < block.before for block in blocks)
        for name, tensor in start.state_dict().items():
            assert torch.equal(tensor, before[name])  # the copy shares them
        for name, parameter in actual.named_parameters():
            if name.endswith("weight"):
                assert torch.equal(pt2mx.fake_quantize_mx(parameter, FP4), parameter)
            else:
                assert torch.equal(parameter, before[name])
        prepared = pt2mx.prepare_pt2e(actual, quantizer)
        pt2mx.enable_fake_quant(prepared)
        assert torch.equal(pt2mx.convert_pt2e(prepared)(x), prepared(x))


def by_gptq(graph, batches):
    """Return the graph with one weight rounded."""
    start = copy_sharing_tensors(graph)
    stack = torch.cat(batches)
    weight = start.get_parameter("layers.0.up.weight")
    rounded = gptq(weight, stack.T @ stack, FP4)
    start.get_submodule("layers.0.up").weight = nn.Parameter(rounded)
    return start


def test_a_step_that_gains_nothing_is_not_kept(monkeypatch):
    graph, batches, x = net()
    descend = LatentWeight.descend
    monkeypatch.setattr(LatentWeight, "descend", lambda self, gradient, rate: descend(self, gradient, 150 * rate))
    actual, blocks = learned(graph, graph, W4, batches, steps=3)  # far too large a step
    assert blocks == [] and torch.equal(actual(x), graph(x))


def test_subgraphs_and_outputs_without_gradient():
    def forward(self, x):
        x = self.before(x)
        with torch.no_grad():
            x = torch.relu(self.inside(x))
        return self.last(x)

    graph, batches, _ = net(module_of(forward, before=residual(), inside=nn.Linear(32, 32), last=nn.Linear(32, 8)))
    with torch.no_grad():  # a caller may disable gradients
        actual, (block,) = learned(graph, graph, W4, batches, steps=30)
    assert torch.equal(actual.get_parameter("inside.weight"), graph.get_parameter("inside.weight"))
    weight = graph.get_parameter("before.up.weight").detach()
    assert torch.equal(actual.get_parameter("before.up.weight"), pt2mx.fake_quantize_mx(weight, FP4))
    assert block.after < block.before


def test_two_runs_give_the_same_bits_and_seeds_do_not():
    graph, batches, _ = net()
    first, second, other = (learned(graph, graph, W4, batches, steps=8, seed=s)[0].state_dict() for s in (0, 0, 1))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models(dtype):
    graph, batches, x = net(dtype=dtype)
    actual, blocks = learned(graph, graph, W4, batches, steps=40)
    assert len(blocks) == 3 and actual.get_parameter("head.weight").dtype == dtype
    assert error(actual, W4, graph, x) < 0.9 * error(graph, W4, graph, x)


def test_weights_that_stay():
    class Others(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.table = nn.Sequential(residual(), residual()), nn.Embedding(4, 32)
            self.layers[1].up.weight = self.layers[0].up.weight
            self.register_buffer("calls", torch.zeros(()))
            self.last = nn.Linear(32, 32)

        def forward(self, x):
            x = self.layers(x + self.table(torch.arange(len(x)) % 4))
            self.calls.add_(1)
            return self.last(x + self.calls)

    graph, batches, _ = net(Others())
    ceil = get_default_mx_quantization_config(weight=MXSpec("mxfp4", scale_mode="ceil"), activation=None)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight=FP4, activation=None))
    quantizer.set_module_name("layers.1.down", ceil)
    actual, blocks = learned(graph, graph, quantizer, batches, steps=10)
    # skipped: a weight of two blocks, a weight whose scale mode is not idempotent, an embedding, a weight of a block
    # that writes
    assert [block.weights for block in blocks] == [("layers.0.down.weight",)]
    assert actual.get_buffer("calls") == graph.get_buffer("calls") == 0


def test_dynamic_shapes_named_batches_and_a_single_one():
    torch.manual_seed(0)
    shapes = {"x": {0: torch.export.Dim("rows")}}
    graph = torch.export.export(two_layers().eval(), (), {"x": torch.randn(4, 32)}, dynamic_shapes=shapes).module()
    batches = [{"x": torch.randn(rows, 32)} for rows in (96, 33, 64)]
    for chosen in (batches, batches[:1]):
        _, blocks = learned(graph, graph, W4, chosen, steps=30)
        assert len(blocks) == 3


def test_convolutions_and_constant_chains():
    torch.manual_seed(0)
    batches = [torch.randn(16, 4, 9, 9) for _ in range(4)]
    images = module_of(
        lambda self, x: torch.relu(self.conv(x)).mean((2, 3)) @ (self.weight * 2),
        conv=nn.Conv2d(4, 32, 3),
        weight=nn.Parameter(torch.randn(32, 16) / 4),
    )
    graph = torch.export.export(images.eval(), (batches[0],)).module()
    actual, (block,) = learned(graph, graph, W4, batches, steps=30)
    assert block.weights == ("conv.weight", "weight") and "weight_rounded" in dict(actual.named_buffers())
    assert error(actual, W4, graph, batches[0]) < error(graph, W4, graph, batches[0])


def test_bad_input():
    graph, batches, _ = net()
    with pytest.raises(MXError, match="batches is empty"):
        learned(graph, graph, W4, [])
    with pytest.raises(MXError, match=r"not Tensor: pass \[batch\]"):
        learned(graph, graph, W4, batches[0])
