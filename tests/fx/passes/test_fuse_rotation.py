import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import lower_to_inductor, ops
from pt2mx.algorithms import Rotation
from pt2mx.fx.passes.fuse_rotation import fuse_rotation
from pt2mx.kernels.select import USES
from pt2mx.ops import linear
from pt2mx.ops.hadamard import hadamard, rotated_fake_quantize_mx
from tests.graph import count

aten = torch.ops.aten
X = torch.linspace(-3, 3, 2 * 64).reshape(2, 64)


class Rotated(nn.Module):
    def __init__(self, after):
        super().__init__()
        self.register_buffer("data", torch.randint(100, (24, 64), dtype=torch.uint8))
        self.register_buffer("scale", torch.full((24, 2), 126, dtype=torch.uint8))
        self.after = after

    def forward(self, x):
        return self.after(self, x)

    def matmul(self, x):
        return linear.linear_mx(x, self.data, self.scale, None, "fp8_e4m3", 32, 0)


def quantized(x, *modes):
    return pt2mx.fake_quantize_mx(x, "fp4_e2m1", 32, *modes)


def exported(after, x=X):
    return torch.export.export(Rotated(after), (x,)).module()


@pytest.mark.parametrize("modes", [(), (1, "even"), (-1, "floor", "half_away")])
def test_quantization_rotates(modes):
    model = exported(lambda self, x: quantized(hadamard(x, 32, -1), *modes) * 2)
    want = model(X)
    fuse_rotation(model)
    assert torch.equal(model(X), want)
    (fused,) = model.graph.find_nodes(op="call_function", target=rotated_fake_quantize_mx)
    assert fused.meta["val"].shape == (2, 64) and not count(model, hadamard) and not count(model, ops.fake_quantize_mx)


def test_a_product_rotates():
    model = exported(lambda self, x: self.matmul(hadamard(x, 16, -1)))
    want = model(X)
    fuse_rotation(model)
    assert torch.equal(model(X), want) and not count(model, hadamard)
    (matmul,) = model.graph.find_nodes(op="call_function", target=linear.linear_mx)
    assert matmul.args[-2] == 16
    code = model.code
    assert fuse_rotation(model).code == code


@pytest.mark.parametrize(
    "after",
    [
        lambda self, x: quantized(hadamard(x, 32, -1)) + hadamard(x, 32, -1),
        lambda self, x: (lambda y: (quantized(y), self.matmul(y)))(hadamard(x, 32, -1)),
        lambda self, x: (lambda y: (self.matmul(y), y + 1))(hadamard(x, 32, -1)),
        lambda self, x: quantized(hadamard(x, 2, 0)),
        lambda self, x: quantized(hadamard(x, 32, -1), 0),
        lambda self, x: quantized(hadamard(x, 32, -1), -1, "floor", "stochastic", 5),
        lambda self, x: quantized(hadamard(x, 32, -1), -1, "floor", "even", None, "clipped"),
        lambda self, x: self.matmul(hadamard(x, 2, 0)),
    ],
)
def test_others_stay(after):
    model = exported(after)
    shared = [n for n in model.graph.nodes if n.target is hadamard]
    want, code = model(X), model.code
    fuse_rotation(model)
    got = model(X)
    assert all(map(torch.equal, got, want)) if isinstance(want, tuple) else torch.equal(got, want)
    assert model.code == code or len(shared) == 2


def test_what_is_written_in_between_is_not_read():
    def after(self, x):
        x = x + 0
        y = hadamard(x, 32, -1)
        x.zero_()
        return self.matmul(y)

    model = exported(after)
    want = model(X)
    fuse_rotation(model)
    assert torch.equal(model(X), want) and want.any()


@pytest.mark.compiled_except("dtype1-*")
@pytest.mark.parametrize("recipe", ["mxfp4_weight_only", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimized_model(recipe, dtype, monkeypatch):
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).eval().to(dtype)
    x, quantizer = X.to(dtype), pt2mx.MXQuantizer.from_recipe(recipe)
    program = torch.export.export(model, (x,)).module()
    program = pt2mx.optimize(program, quantizer, algorithms=(Rotation(),))
    prepared = pt2mx.prepare_pt2e(program, quantizer)
    prepared(x)
    converted = pt2mx.convert_pt2e(prepared)
    lowered = lower_to_inductor(converted)
    assert not count(lowered, hadamard) and count(converted, hadamard) == 2
    rotations = [n.args[-2] for n in lowered.graph.nodes if n.target is linear.linear_mx]
    assert rotations == ([32, 32] if recipe == "mxfp4_weight_only" else [0, 0])
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(lowered(x), converted(x), **close)
    monkeypatch.setitem(USES, "multiply by packed weights", {})  # whose weights stay packed
    unpacked = lower_to_inductor(lowered, unpack=True)  # again
    assert not count(unpacked, linear.linear_mx) and count(unpacked, hadamard) == 2 * (recipe == "mxfp4_weight_only")
    torch.testing.assert_close(unpacked(x), converted(x), **close)
    again = torch.export.export(lowered, (x,))
    torch.testing.assert_close(pt2mx.make_portable(again).module()(x), converted(x), **close)
