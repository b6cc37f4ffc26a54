"""Affine quantization of some roles by torchao's own modules, together with block formats."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, fake_quantize_mx, ops
from pt2mx.pt2e import pt2bfp
from pt2mx.pt2e.observe.torchao_pt2e import FakeQuantize
from tests.compare import same
from tests.flow import exported

X = torch.linspace(-1, 2, 128).view(2, 64)
UINT8 = pt2bfp.BFPQuantizationSpec(torch.uint8, pt2bfp.default_fake_quant)
BFP16 = pt2bfp.BFPQuantizationSpec("BFP[8|8]{64}(SN)")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def affine(x, seen, low=0, high=255):
    """Fake quantize x by the definition, with the scale and zero point of the range of `seen`."""
    smallest, largest = min(float(seen.min()), 0.0), max(float(seen.max()), 0.0)
    scale = torch.tensor((largest - smallest) / (high - low))
    zero_point = int(low - torch.round(torch.tensor(smallest) / scale))
    return torch.fake_quantize_per_tensor_affine(x, float(scale), zero_point, low, high)


def targets(model):
    return [str(node.target) for node in model.graph.nodes if node.op == "call_function"]


@torch.no_grad()
def test_uint8_activations_and_block_weights():
    model = net()
    quantizer = pt2bfp.BFPQuantizer().set_global(pt2bfp.BFPQuantizationConfig(UINT8, None, BFP16, None))
    prepared = pt2bfp.prepare_pt2e(exported(model, X), quantizer)
    fakes = [m for m in prepared.modules() if isinstance(m, FakeQuantize)]
    assert [(m.dtype, m.quant_min, m.quant_max) for m in fakes] == [(torch.uint8, 0, 255)] * 2
    prepared(X)
    converted = pt2bfp.convert_pt2e(prepared)
    # during calibration fake quantizers quantize, and observers of block formats do not
    first = nn.functional.linear(affine(X, X), model[0].weight, model[0].bias)
    x = X
    for layer, seen in ((model[0], X), (model[2], torch.relu(first))):
        x = torch.relu(x) if layer is model[2] else x
        x = nn.functional.linear(affine(x, seen), fake_quantize_mx(layer.weight, pt2bfp.DEFAULT_FORMAT), layer.bias)
    torch.testing.assert_close(converted(X), x, rtol=1e-5, atol=1e-5)
    assert sum("quantize_per_tensor" in name for name in targets(converted)) == 4
    assert sum(node.target is ops.dequantize_mx for node in converted.graph.nodes) == 2


@torch.no_grad()
@pytest.mark.parametrize(
    ("weight", "operator"),
    [
        (pt2bfp.default_weight_fake_quant, "dequantize_per_tensor"),
        (pt2bfp.default_per_channel_weight_fake_quant, "dequantize_per_channel"),
    ],
)
def test_affine_weights_by_a_qconfig(weight, operator):
    qconfig = pt2bfp.QConfig(pt2bfp.default_fake_quant, weight)
    prepared = pt2bfp.prepare_fx(torch.fx.symbolic_trace(net()), {"": qconfig}, (X,))
    prepared(X)
    converted = pt2bfp.convert_fx(prepared)
    assert sum(operator in name for name in targets(converted)) == (4 if "tensor" in operator else 2)
    assert all(buffer.dtype == torch.int8 for name, buffer in converted.named_buffers() if buffer.dim() == 2)
    assert pt2mx.quantization_report(converted).operators
    torch.testing.assert_close(converted(X), net()(X), rtol=0.1, atol=0.05)


@torch.no_grad()
@pytest.mark.parametrize(
    ("observer", "kind"),
    [
        (pt2bfp.MinMaxObserver.with_args(eps=2**-12), "MinMaxObserver"),
        (pt2bfp.PerChannelMinMaxObserver, "PerChannelMinMaxObserver"),
        (pt2bfp.MovingAverageMinMaxObserver.with_args(averaging_constant=0.5), "MovingAverageMinMaxObserver"),
        (pt2bfp.MovingAveragePerChannelMinMaxObserver, "MovingAveragePerChannelMinMaxObserver"),
        (pt2bfp.HistogramObserver.with_args(eps=2**-12), "HistogramObserver"),
        (pt2bfp.FakeQuantize.with_args(observer=pt2bfp.MinMaxObserver), "FakeQuantize"),
        (pt2bfp.default_fake_quant.with_args(eps=2**-12), "FakeQuantize"),
    ],
)
def test_observers_of_these_names_are_torchaos_for_uint8(observer, kind):
    spec = pt2bfp.BFPQuantizationSpec(torch.uint8, observer)
    quantizer = pt2bfp.BFPQuantizer().set_global(pt2bfp.BFPQuantizationConfig(spec, None, None, None))
    prepared = pt2bfp.prepare_pt2e(exported(nn.Linear(64, 8).eval(), X), quantizer)
    assert [type(m).__name__ for m in prepared.children() if type(m).__module__.startswith("torchao")] == [kind]
    prepared(X)
    assert any("dequantize_per" in name for name in targets(pt2bfp.convert_pt2e(prepared)))


class Affine(pt2bfp.BFPQuantizer):
    """Annotates as a program of pt2-bfp does."""

    def annotate(self, model):
        config = pt2bfp.BFPQuantizationConfig(UINT8, UINT8, BFP16, None)
        for node in model.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                pt2bfp._annotate_input_qspec_map(node, node.args[0], pt2bfp.get_input_act_qspec(config))
                pt2bfp._annotate_output_qspec(node.args[1], pt2bfp.get_weight_qspec(config))
                pt2bfp._annotate_output_qspec(node, pt2bfp.get_output_act_qspec(config))
        return model


@torch.no_grad()
def test_annotations_by_a_subclass():
    prepared = pt2bfp.prepare_pt2e(exported(nn.Linear(64, 8).eval(), X), Affine())
    prepared(X)
    converted = pt2bfp.convert_pt2e(prepared)
    assert sum("dequantize_per_tensor" in name for name in targets(converted)) == 2
    assert converted.weight_data.dtype == torch.uint8


def test_training_with_uint8_activations():
    config = pt2bfp.BFPQuantizationConfig(UINT8, None, BFP16, None)
    qat = pt2bfp.prepare_qat_pt2e(exported(net().train(), X), pt2bfp.BFPQuantizer().set_global(config))
    qat(X).square().sum().backward()
    assert all(parameter.grad is not None for parameter in qat.parameters())
    assert same(pt2bfp.convert_pt2e(qat)(X), pt2bfp.convert_pt2e(qat)(X))


def test_a_dictionary_names_affine_roles():
    config = pt2bfp.BFPQuantizationConfig(UINT8, None, BFP16, None)
    plain = pt2bfp.BFPQuantizer().set_global(config).to_dict()
    assert plain[""] == {"weight": "mxint8{64}", "activation": "torch.uint8"}
    with pytest.raises(MXError, match=r"activation: .*torch\.uint8"):
        pt2bfp.BFPQuantizer.from_dict(plain)


def test_spec():
    spec = pt2bfp.BFPQuantizationSpec(torch.int8, qscheme=torch.per_tensor_symmetric).affine
    assert (spec.dtype, spec.quant_min, spec.quant_max) == (torch.int8, -128, 127)
    assert spec.qscheme == torch.per_tensor_symmetric
    with pytest.raises(MXError, match="MXObserver computes no affine scale"):
        _ = pt2bfp.BFPQuantizationSpec(torch.uint8, pt2bfp.PlaceholderObserver).affine
    with pytest.raises(MXError, match="3 makes no observer: give one of"):
        _ = pt2bfp.BFPQuantizationSpec(torch.uint8, 3).affine
    with pytest.raises(MXError, match="float32"):
        pt2bfp.BFPQuantizationSpec(torch.float32)
