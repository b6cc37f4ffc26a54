import copy

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, fake_quantize_mx, get_default_mx_quantization_config
from pt2mx.algorithms import GPTQ, Rotation
from pt2mx.fx.graph.tensors import generate_code
from pt2mx.ops.hadamard import hadamard
from pt2mx.ops.linear import linear_mx
from pt2mx.pt2e.flow.prepare import to_annotate
from pt2mx.pt2e.optimize.rotation import rotate_matmuls
from pt2mx.pt2e.optimize.targets import weight_targets
from tests.graph import count
from tests.models import module_of

W4 = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation=None))


class Net(nn.Module):
    """Two layers of one input, a layer whose length 4 divides, a layer whose length 4 does not divide, a convolution
    and a tied embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 64)
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 36, bias=False)
        self.four, self.odd = nn.Linear(36, 33), nn.Linear(33, 64)
        self.conv, self.head = nn.Conv1d(64, 64, 1), nn.Linear(64, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):  # (B, S) -> (B, S, 20)
        x = self.embedding(ids)
        y = self.odd(torch.relu(self.four(self.key(x)))) + self.query(x)
        return self.head(self.conv(y.transpose(1, 2)).transpose(1, 2))


def rotated(model, *args, quantizer=W4):
    graph = generate_code(to_annotate(torch.export.export(model.eval(), args).module()))
    rotate_matmuls(graph, weight_targets(graph, quantizer), {}, Rotation())
    graph.graph.lint()
    graph.recompile()
    return graph


def test_the_float_model_stays_within_rounding():
    torch.manual_seed(0)
    model, ids = Net(), torch.randint(0, 20, (2, 5))
    before = copy.deepcopy(model.state_dict())
    graph = rotated(model, ids)
    torch.testing.assert_close(graph(ids), model(ids), rtol=1e-4, atol=1e-5)
    nodes = graph.graph.find_nodes(op="call_function", target=hadamard)
    assert [node.args[1] for node in nodes] == [32, 4]  # one for query and key
    assert all(node.meta["val"].shape[:2] == (2, 5) and node.meta["nn_module_stack"] for node in nodes)
    state = graph.state_dict()
    stays = {name for name, tensor in before.items() if torch.equal(state[name], tensor)}
    assert set(before) - stays == {"query.weight", "key.weight", "four.weight"}


@pytest.mark.parametrize(
    ("dtype", "weight", "inputs", "rotates"),
    [
        (torch.float32, 3e38, 1e-3, False),
        (torch.float32, 1e36, 1e-3, True),
        (torch.float16, 1.0, 3e4, False),
        (torch.float16, 1.0, 3e3, True),
        (torch.float32, 1e-3, 1e38, False),
    ],
)
def test_no_rotation_where_it_would_overflow(dtype, weight, inputs, rotates):
    layer = nn.Linear(64, 8, bias=False).eval().to(dtype)
    layer.weight.data.fill_(weight)
    x = torch.full((4, 64), inputs, dtype=dtype)
    graph = torch.export.export(layer, (x,)).module()
    optimized = pt2mx.optimize(graph, W4, [x], algorithms=(Rotation(), GPTQ()))
    assert bool(optimized.graph.find_nodes(op="call_function", target=hadamard)) == rotates
    assert optimized.weight.isfinite().all()
    plain, rounded = (fake_quantize_mx(w.detach().float(), "mxfp4") for w in (layer.weight, optimized.weight))
    assert plain.isfinite().all() and rounded.isfinite().all()


def test_an_input_that_is_written_stays():
    def forward(self, x):
        x = x.clone()
        y = self.first(x)
        x[0] = 1
        return y + self.second(x)

    x = torch.randn(4, 64)
    model = module_of(forward, first=nn.Linear(64, 64), second=nn.Linear(64, 64))
    graph = rotated(model, x)
    assert count(graph, hadamard) == 0
    assert torch.equal(graph(x), model(x))


def test_an_input_that_is_the_bias_too():
    torch.manual_seed(0)
    residual = module_of(lambda self, x: torch.addmm(x, x, self.weight), weight=nn.Parameter(torch.randn(64, 64)))
    model, x = residual, torch.randn(4, 64)
    graph = rotated(model, x)
    assert count(graph, hadamard) == 1
    torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.compiled
@pytest.mark.parametrize("activation", [None, "mxfp8"])
def test_rotated_models_keep_the_packed_matmuls(activation, compiler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).eval()
    x = torch.randn(4, 64)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation=activation))
    optimized = pt2mx.optimize(torch.export.export(model, (x,)).module(), quantizer, [x])
    assert [row.rotated for row in pt2mx.optimization_report(optimized).weights] == [32, 32]
    prepared = pt2mx.prepare_pt2e(optimized, quantizer)
    converted = pt2mx.convert_pt2e(prepared)
    pt2mx.enable_fake_quant(prepared)
    assert torch.equal(converted(x), prepared(x)) and count(converted, hadamard) == 2
    lowered = pt2mx.lower_to_inductor(converted)
    assert count(lowered, linear_mx) == 2 and count(lowered, hadamard) == 0  # in the kernels that read them
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(lowered)(x), converted(x), rtol=1e-3, atol=1e-3)
    program = pt2mx.make_portable(torch.export.export(converted, (x,)))
    assert count(program.graph_module, hadamard) == 0
    assert torch.equal(program.module()(x), converted(x))


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.q, self.k, self.v, self.fused = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), fused

    def forward(self, x):  # (B, S, 64) -> (B, 4, S, 16)
        q, k, v = (layer(x).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.softmax(q @ k.transpose(-2, -1) / 4, -1) @ v


@pytest.mark.parametrize("fused", [True, False])
def test_queries_and_keys(fused):
    torch.manual_seed(0)
    model, x = Attention(fused).eval(), torch.randn(2, 5, 64)
    graph = torch.export.export(model, (x,)).module()
    w4a4 = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation="mxfp4"))
    optimized = pt2mx.optimize(graph, w4a4, [x], algorithms=Rotation(attention=True))
    nodes = optimized.graph.find_nodes(op="call_function", target=hadamard)
    axes = sorted(tuple(node.args[1:]) for node in nodes)
    assert axes == ([(16, -1), (16, -1), (32, -1)] if fused else [(16, -2), (16, -1), (32, -1)])
    torch.testing.assert_close(optimized(x), graph(x), rtol=1e-4, atol=1e-5)
    prepared = pt2mx.prepare_pt2e(optimized, w4a4)
    converted = pt2mx.convert_pt2e(prepared)
    pt2mx.enable_fake_quant(prepared)
    assert torch.equal(converted(x), prepared(x))
    again = pt2mx.optimize(optimized, w4a4, [x], algorithms=Rotation(attention=True))
    assert count(again, hadamard) == 3
    eight = pt2mx.optimize(graph, MXQuantizer.from_recipe("mxfp8"), [x], algorithms=Rotation(attention=True))
    assert count(eight, hadamard) == 0
