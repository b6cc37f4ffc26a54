"""Weights whose scales have a significand: rounded by every algorithm, and stored as codes with the scales chosen."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import get_default_mx_quantization_config as config
from tests.graph import calls
from tests.optimized_models import exported, net, quantized, rows

ops = torch.ops.pt2mx


def quantizer(weight="nvfp4", activation=None):
    return pt2mx.MXQuantizer().set_global(config(weight=weight, activation=activation))


def relative_error(y, exact):
    return float((y - exact).detach().square().sum() / exact.detach().square().sum())


@pytest.mark.compiled_except("int4{32}(bf16)-*")
@pytest.mark.slow_cases("nvfp4-None-bounds0")
@pytest.mark.parametrize(
    ("weight", "activation", "bounds"),
    [
        ("nvfp4", None, {"fast": 0.85, "imatrix": 0.85, "balanced": 0.5, "best": 0.45}),
        ("nvfp4", "nvfp4", {"fast": 0.9, "balanced": 0.75, "best": 0.7}),
        ("int4{32}(bf16)", None, {"fast": 0.9, "balanced": 0.55}),
    ],
)
def test_each_preset_lowers_the_error(weight, activation, bounds):
    graph, batches, ids = net()
    exact, errors = graph(ids), {}
    for preset in ("nearest", *bounds):
        q = quantizer(weight, activation)
        optimized = graph if preset == "nearest" else pt2mx.optimize(graph, q, batches, preset=preset)
        prepared = pt2mx.prepare_pt2e(optimized, q)
        for batch in batches:
            prepared(*batch)
        pt2mx.enable_fake_quant(prepared)
        want = prepared(ids)
        converted = pt2mx.convert_pt2e(prepared)
        assert torch.equal(converted(ids), want)
        errors[preset] = relative_error(converted(ids), exact)
    for preset, bound in bounds.items():
        assert errors[preset] < bound * errors["nearest"], errors


def test_codes_are_stored_with_their_scales():
    graph, batches, ids = net()
    optimized = pt2mx.optimize(graph, quantizer(), batches, preset="balanced")
    stored, converted = dict(optimized.named_buffers()), quantized(optimized, quantizer())
    assert {f"up.weight_{part}" for part in ("data", "scale", "tensor_scale")} <= stored.keys()
    assert "up.weight" not in dict(optimized.named_parameters())
    assert all(torch.equal(tensor, stored[name]) for name, tensor in converted.state_dict().items() if name in stored)
    assert {row.rotated for row in rows(optimized).values()} == {0, 16}  # within blocks of 16
    assert torch.equal(converted(ids), optimized(ids))
    report = pt2mx.quantization_report(converted)
    specs = {row.module: [o.spec for o in row.operands if o.role == "weight"] for row in report.operators}
    assert specs == {module: ["nvfp4_e2m1{16}"] for module in ("embedding", "up", "down", "head")}
    assert not any(row.reason for row in report.operators)
    lowered = pt2mx.lower_to_inductor(converted)
    assert len(calls(lowered, ops.linear_mx.default)) == 3
    torch.testing.assert_close(lowered(ids), optimized(ids), rtol=1e-5, atol=1e-6)


def test_convolutions():
    torch.manual_seed(0)
    x = torch.randn(4, 8, 9, 9)
    graph = exported(nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3)), x)
    exact, nearest = graph(x), quantized(graph, quantizer())
    optimized = quantized(pt2mx.optimize(graph, quantizer(), [(x,)], preset="balanced"), quantizer())
    assert relative_error(optimized(x), exact) < 0.6 * relative_error(nearest(x), exact)


def test_weights_of_blocks_of_several_rows_are_left_alone():
    graph, batches, _ = net()
    q = quantizer("fp8_e4m3{16x16}(f32)")
    optimized = pt2mx.optimize(graph, q, batches, preset="fast")
    assert {row.reason for row in rows(optimized).values()} == {"its blocks have several rows"}
    assert not calls(optimized, ops.dequantize_mx.default)


class Siblings(nn.Module):
    """Two pairs of layers of one input; of the first, one keeps its codes when it is rounded to nearest."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.key, self.value = nn.Linear(64, 32, bias=False), nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            self.gate.weight.copy_(6 * torch.randint(0, 2, (96, 64)))
            self.up.weight *= 20
            self.value.weight *= 3

    def forward(self, x):
        x = x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))
        return self.value(x).sin(), self.key(x).relu()


@pytest.mark.compiled_except("options1-nvfp4", "options3-fp4_e2m1*")
@pytest.mark.parametrize("weight", ["nvfp4", "fp4_e2m1{16}(e4m3_f32_divisor)"])
@pytest.mark.parametrize(
    "options",
    [
        {"preset": "fast"},
        {"preset": "balanced", "in_place": True},
        {"preset": "best"},
        {"algorithms": (pt2mx.algorithms.LearnedRounding(steps=20),)},
    ],
)
def test_siblings_keep_one_tensor_scale(options, weight):
    torch.manual_seed(0)
    batches = [(torch.randn(64, 64),) for _ in range(4)]
    graph, q = exported(Siblings(), *batches[0]), quantizer(weight)
    exact = graph(*batches[0])
    nearest = quantized(graph, q)(*batches[0])
    converted = quantized(pt2mx.optimize(graph, q, batches, **options), q)
    scales = {name.split(".")[0]: t.item() for name, t in converted.named_buffers() if name.endswith("tensor_scale")}
    assert scales["gate"] == scales["up"] and scales["key"] == scales["value"]
    assert len(set(scales.values())) == 3
    optimized = converted(*batches[0])
    assert relative_error(optimized[0], exact[0]) < 0.95 * relative_error(nearest[0], exact[0])
    lowered = pt2mx.lower_to_inductor(converted)
    assert len(calls(lowered, ops.linear_mx.default)) == 3
    torch.testing.assert_close(lowered(*batches[0]), optimized, rtol=1e-4, atol=1e-5)


def test_training_warns_of_codes():
    graph, batches, _ = net()
    optimized = pt2mx.optimize(graph, quantizer(), batches, preset="fast")
    message = "^optimize stored up.weight, down.weight, head.weight as codes, .* to train them, prepare the exported"
    with pytest.warns(UserWarning, match=message) as warned:
        qat = pt2mx.prepare_qat_pt2e(optimized, quantizer())
    assert [one.filename for one in warned] == [__file__]
    assert [name for name, _ in qat.named_parameters()] == ["up.bias"]
    pt2mx.prepare_qat_pt2e(pt2mx.optimize(graph, quantizer("mxfp4"), batches, preset="fast"), quantizer("mxfp4"))
