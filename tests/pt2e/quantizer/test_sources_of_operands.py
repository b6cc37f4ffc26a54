import torch
import torch.nn.functional as F
from torch import nn

from pt2mx import MXQuantizationConfig, MXQuantizer, fake_quantize_mx
from tests.models import module_of
from tests.quantized_by_hand import BOTH, A, W, a, w


def test_weights_behind_casts_and_splits(quantize):
    def forward(self, x):
        q, k, v = self.qkv.chunk(3)
        return F.linear(x, q), F.linear(x, k), x @ v.t(), F.linear(x, self.small.float())

    net = module_of(
        forward, qkv=nn.Parameter(torch.randn(60, 40)), small=nn.Parameter(torch.randn(8, 40, dtype=torch.bfloat16))
    )
    model, inputs = net.eval(), (torch.randn(3, 40),)
    prepared, _, converted = quantize(torch.export.export(model, inputs), BOTH, inputs)
    x = a(inputs[0], -1)
    with torch.no_grad():
        q, k, v = model.qkv.chunk(3)
        want = F.linear(x, w(q, -1)), F.linear(x, w(k, -1)), x @ w(v.t(), 0), F.linear(x, w(model.small.float(), -1))
        for got, expected, before in zip(converted(*inputs), want, prepared, strict=True):
            assert torch.equal(got, expected) and torch.equal(got, before)
    assert {t.dtype for t in converted.state_dict().values()} == {torch.uint8}


def test_two_consumers_that_need_different_blocks_are_both_right(quantize):
    two = module_of(
        lambda self, x: (self.first(x), self.second(x), x @ x), first=nn.Linear(40, 40), second=nn.Linear(40, 40)
    )
    model, inputs = two.eval(), (torch.randn(40, 40),)
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(activation=A, weight=W))
    quantizer.set_module_name("second", MXQuantizationConfig(activation="mxfp4{8}", weight=W))
    prepared, _, converted = quantize(torch.export.export(model, inputs), quantizer, inputs)
    x = inputs[0]
    want = (
        F.linear(a(x, -1), w(model.first.weight, -1), model.first.bias),
        F.linear(fake_quantize_mx(x, "mxfp4{8}"), w(model.second.weight, -1), model.second.bias),
        a(x, -1) @ a(x, -2),
    )
    got = converted(x)
    assert all(map(torch.equal, got, want))
    assert all(torch.equal(p, c) for p, c in zip(prepared, got, strict=True))
