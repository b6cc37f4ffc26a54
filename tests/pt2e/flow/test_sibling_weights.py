"""Which weights of one input share a tensor scale, in models that are not as simple as a decoder's layer."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer
from pt2mx.fx.graph.constants import computed_from
from tests.flow import calibrated, exported
from tests.graph import calls

X = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
NVFP4 = MXQuantizationConfig(weight="nvfp4")


class Layer(nn.Module):
    """Queries, keys and values of x."""

    def __init__(self, change=lambda layer: None):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.m = nn.Parameter(torch.randn(32, 32))
        with torch.no_grad():
            change(self)

    def forward(self, x):
        return self.q(x) * self.k(x) + self.v(x)


class WithMatmul(Layer):
    """One more weight of x, whose rows are the reduced dimension."""

    def forward(self, x):
        return super().forward(x) + x @ self.m


class Tied(Layer):
    """The weight of the queries multiplies the result, too."""

    def forward(self, x):
        return nn.functional.linear(super().forward(x).tanh(), self.q.weight)


class WithSlice(Layer):
    """One more weight of x, computed from a parameter."""

    def forward(self, x):
        return super().forward(x) + nn.functional.linear(x, self.m[:16]).sum(-1, keepdim=True)


def groups(prepared):
    """The names of the parameters of each group, and of each weight alone."""
    names = set()
    for node in prepared.graph.find_nodes(op="call_module"):
        sources = [one for amax in node.args[1:] or node.args for one in computed_from(amax) if one.op == "get_attr"]
        names.add(tuple(sorted({str(one.target).removesuffix(".weight") for one in sources})))
    return names - {()}


@pytest.mark.diagonal
@pytest.mark.parametrize("qat", [False, True])
@pytest.mark.parametrize(
    ("layer", "settings", "want"),
    [
        (Layer(), {}, {("k", "q", "v")}),
        (Layer(), {"k": None}, {("q", "v")}),
        (Layer(), {"k": MXQuantizationConfig(weight="mxfp4")}, {("k",), ("q", "v")}),
        (Layer(), {"k": MXQuantizationConfig(weight="nvfp4(mse)")}, {("k",), ("q", "v")}),
        (WithMatmul(), {}, {("k", "q", "v"), ("m",)}),
        (Tied(), {}, {("k", "q", "v")}),
        (WithSlice(), {}, {("k", "m", "q", "v")}),
        (
            Layer(lambda layer: weight_norm(layer.q)),
            {},
            {("k", "q.parametrizations.weight.original0", "q.parametrizations.weight.original1", "v")},
        ),
    ],
)
def test_who_shares(layer, settings, want, qat):
    quantizer = MXQuantizer().set_global(NVFP4)
    for name, config in settings.items():
        quantizer.set_module_name(name, config)
    prepare = pt2mx.prepare_qat_pt2e if qat else pt2mx.prepare_pt2e
    prepared = prepare(exported(layer.eval(), X), quantizer)
    assert groups(prepared) == want
    with torch.no_grad():
        prepared(X)
        converted = pt2mx.convert_pt2e(prepared)
        pt2mx.enable_fake_quant(prepared)
        assert torch.equal(converted(X), prepared(X))
        torch.testing.assert_close(pt2mx.lower_to_inductor(converted)(X), converted(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("value", "largest"), [(0.0, "q"), (torch.inf, "q"), (torch.nan, "q"), (3e38, "k")])
def test_a_sibling_of_extreme_values(value, largest):
    layer = Layer(lambda layer: layer.k.weight.fill_(value)).eval()
    prepared = calibrated(exported(layer, X), MXQuantizer().set_global(NVFP4), X)
    finite = value in (0.0, 3e38)
    with nullcontext() if finite else pytest.warns(UserWarning, match="NaN or Inf in k.weight"):
        converted = pt2mx.convert_pt2e(prepared)
    others = [layer.q.weight, layer.v.weight] if largest == "q" else [layer.k.weight]
    t = pt2mx.tensor_scale_mx(torch.cat(others), "nvfp4")
    assert all(converted.get_buffer(f"{name}.weight_tensor_scale").equal(t) for name in "qkv")


def test_the_state_of_another_prepared_model():
    first, second = (
        pt2mx.prepare_qat_pt2e(exported(Layer(change), X), MXQuantizer().set_global(NVFP4))
        for change in (lambda layer: None, lambda layer: layer.v.weight.mul_(100))
    )
    with torch.no_grad():
        assert not torch.equal(first(X), second(X))
        second.load_state_dict(first.state_dict())
        assert torch.equal(first(X), second(X))
        converted = pt2mx.convert_pt2e(second)
        assert torch.equal(converted(X), first(X))
    assert len(calls(pt2mx.lower_to_inductor(converted), torch.ops.pt2mx.linear_mx.default)) == 1
