"""Models that write to their buffers and inputs, through the flow."""

import copy

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config
from tests.models import module_of

QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config())


def test_written_buffers_are_not_folded():
    def forward(self, x):
        self.keys.add_(x)
        return x @ self.keys.t()

    inputs = (torch.randn(4, 8),)
    model = torch.export.export(module_of(forward, keys=nn.Buffer(torch.randn(4, 8))).eval(), inputs)
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model.module(), QUANTIZER))
    assert "keys" in converted.state_dict() and "keys_data" not in converted.state_dict()
    for _ in range(3):
        keys = converted.keys.clone()
        got = converted(*inputs)
        assert torch.equal(converted.keys, keys + inputs[0])
        want = pt2mx.fake_quantize_mx(inputs[0], "mxfp8") @ pt2mx.fake_quantize_mx(converted.keys.t(), "mxfp8", axis=-2)
        assert torch.equal(got, want)


class WriteInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x):
        x = x.clone()
        x[:, 0] = 5.0
        return self.l(x)


class WriteComputed(WriteInput):
    def forward(self, x):
        h = x * 2
        h.view(-1).mul_(3)
        h[:, :4] = 0
        return self.l(h)


class WriteWeight(WriteInput):
    def forward(self, x):
        weight = self.l.weight.clone()
        weight[:2] = x[:2]
        return nn.functional.linear(x, weight)


class WriteCache(WriteInput):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.randn(4, 8))

    def forward(self, x):
        self.keys[1:3] = x[1:3]
        return x @ self.keys.t()


@pytest.mark.parametrize("model", [WriteInput, WriteComputed, WriteWeight, WriteCache])
def test_what_is_written_through_a_view_is_quantized_as_written(model, quantize):
    torch.manual_seed(0)
    model, inputs = model().eval(), (torch.randn(4, 8),)
    config = get_default_mx_quantization_config("mxint8{4}", "mxint8{4}")
    want, _, converted = quantize(torch.export.export(model, inputs), MXQuantizer().set_global(config), inputs)
    got, reference = converted(*inputs), model(*inputs)
    assert torch.equal(got, want)
    assert (got - reference).square().sum() < 1e-3 * reference.square().sum()


def test_running_a_prepared_model_changes_no_buffer_of_the_callers():
    def forward(self, x):
        self.n.add_(1)
        return self.l(x) * self.n

    x = torch.randn(2, 8)
    net = module_of(forward, l=nn.Linear(8, 8), n=nn.Buffer(torch.zeros(())))
    exported = torch.export.export(net.eval(), (x,)).module()
    model = pt2mx.prepare_pt2e(exported, QUANTIZER)
    model(x)
    model(x)
    converted = pt2mx.convert_pt2e(model)
    converted(x)
    assert (exported.n.item(), model.n.item(), converted.n.item()) == (0, 2, 1), "reset, then called once"


def test_a_written_buffer_of_which_another_is_an_expanded_view(quantize):
    def forward(self, x):
        self.one.mul_(2)
        return self.linear(x * self.ones)

    one, x = torch.ones(1), torch.randn(4, 64)
    model = module_of(forward, linear=nn.Linear(64, 64), one=nn.Buffer(one), ones=nn.Buffer(one.expand(64)))
    program = torch.export.export(copy.deepcopy(model), (x,))
    expected, _, converted = quantize(program, QUANTIZER, (x,))
    assert converted.one.item() == 1 and converted.ones.unique().item() == 1
    converted(x)
    assert torch.equal(converted(x), expected), "the prepared model's second call"
