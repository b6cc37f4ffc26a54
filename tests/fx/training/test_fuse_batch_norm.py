import copy

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config
from pt2mx.fx.training.fuse_batch_norm import NormalizedLayer, ScaledWeight
from tests.flow import assert_converts_to_the_bit, exported, train
from tests.models import Residual, chain, module_of, tied
from tests.training_models import NORMALIZED_LAYERS, layer_and_norm

QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp6{8}", "mxfp8{8}"))


def prepared_for_training(model, inputs):
    return pt2mx.prepare_qat_pt2e(exported(model.train(), *inputs), QUANTIZER)


@pytest.mark.compiled_cases("*3d", "conv1d without bias", "linear without bias")
@pytest.mark.parametrize("name", NORMALIZED_LAYERS)
def test_fused_in_training_and_folded_without_difference(name):
    model, inputs = layer_and_norm(name)
    prepared = prepared_for_training(model, inputs)
    kinds = [type(m) for m in prepared.modules()]
    assert kinds.count(NormalizedLayer) == kinds.count(ScaledWeight) == 1
    pt2mx.disable_fake_quant(prepared)
    reference = copy.deepcopy(model)
    for _ in range(3):  # in high precision it is the layer and the batch norm, running statistics included
        torch.testing.assert_close(prepared(*inputs), reference(*inputs), rtol=1e-4, atol=1e-4)
    state = prepared.state_dict()
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prepared.eval()(*inputs), reference.eval()(*inputs), rtol=1e-4, atol=1e-4)

    pt2mx.enable_fake_quant(prepared)
    train(prepared.train(), *inputs, steps=3)
    converted = assert_converts_to_the_bit(prepared, *inputs)
    assert not any("batch_norm" in str(node.target) for node in converted.graph.nodes)
    held = {key.rpartition(".")[2] for key in converted.state_dict()}
    assert {"weight_data", "weight_scale"} <= held and not held & {"weight", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d, grouped", "linear"])
def test_gradients_are_those_of_the_layer_and_its_batch_norm(name):
    model, inputs = layer_and_norm(name)
    prepared = prepared_for_training(model, inputs)
    pt2mx.disable_fake_quant(prepared)
    for m in (model.train(), prepared):
        (m(*inputs) * torch.arange(inputs[0].shape[0]).view(-1, *[1] * (inputs[0].dim() - 1))).sum().backward()
    # through the folded scale gamma gets what the division takes again
    for (key, want), got in zip(model.named_parameters(), prepared.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-3 * want.grad.abs().max().item(), msg=key)


def test_what_is_not_fused():
    # the convolution's output has another reader
    shared = chain(conv=nn.Conv2d(4, 4, 1), bn=Residual(nn.BatchNorm2d(4)))
    # the batch norm's channels are rows, not features
    by_row = chain(linear=nn.Linear(5, 5), bn=nn.BatchNorm1d(5))
    for model, x in [(shared, torch.randn(2, 4, 3, 3)), (by_row, torch.randn(2, 5, 5))]:
        prepared = prepared_for_training(model, (x,))
        assert not any(isinstance(m, NormalizedLayer) for m in prepared.modules())
        prepared(x)
        assert_converts_to_the_bit(prepared, x)


def test_two_layers_that_share_a_weight_keep_their_own_batch_norms():
    first, second = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False)
    model = chain(first=first, bn1=nn.BatchNorm2d(4), second=second, bn2=nn.BatchNorm2d(4))
    model, x = tied(model, "first", "second"), torch.randn(8, 4, 3, 3)
    with torch.no_grad():
        model.bn1.weight.uniform_(1, 2)
        model.bn2.weight.uniform_(-2, -1)
    prepared = prepared_for_training(model, (x,))
    assert sum(isinstance(m, NormalizedLayer) for m in prepared.modules()) == 2
    prepared(x)
    converted = assert_converts_to_the_bit(prepared, x)
    assert sum("weight_data" in key for key in converted.state_dict()) == 2


@pytest.mark.parametrize("training", [True, False])
def test_in_a_graph_inside(training):
    def forward(self, x):
        with torch.no_grad():
            x = self.bn(self.conv(x))
        return self.head(x)

    x = torch.randn(4, 4, 3, 3)
    model = module_of(forward, conv=nn.Conv2d(4, 8, 1), bn=nn.BatchNorm2d(8), head=nn.Conv2d(8, 2, 1))
    exported = torch.export.export(model.train(training), (x,)).module()
    prepared = pt2mx.prepare_qat_pt2e(exported, QUANTIZER)
    assert any(isinstance(m, NormalizedLayer) for m in prepared.modules())
    prepared.train()(x)
    converted = assert_converts_to_the_bit(prepared, x)
    assert sum("weight_data" in key for key in converted.state_dict()) == 2
