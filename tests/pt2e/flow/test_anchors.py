"""`prepare_qat_pt2e(anchor=...)`: the prepared slice computes what slicing the converted anchor gives, to the bit."""

import copy

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXFakeQuantize, MXQuantizationConfig, MXQuantizer, fake_quantize_mx
from pt2mx.pt2e.optimize.slice import slice_graph
from tests.models import IDS, IMAGES, NormalizedConv, Tied
from tests.subgraph_models import Cond, Nested

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def quantizer(weight, activation=None):
    return MXQuantizer().set_global(MXQuantizationConfig(weight=weight, activation=activation))


INT8, FP4 = quantizer("mxint8", "mxint8"), MXQuantizer.from_recipe("mxfp4")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 10))


def prepared(model, inputs, narrow=FP4, wide=INT8):
    """The exported model, a prepared anchor, and a prepared slice of it."""
    exported = torch.export.export(model, inputs).module()
    anchor = pt2mx.prepare_qat_pt2e(exported, wide)
    return exported, anchor, pt2mx.prepare_qat_pt2e(exported, narrow, anchor=anchor)


def train(models, inputs, steps=3):
    parameters = {id(p): p for model in models for p in model.parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=1e-5)
    for _ in range(steps):
        optimizer.zero_grad()
        for model in models:
            model(*inputs).square().mean().backward()
        optimizer.step()


@pytest.mark.diagonal
@pytest.mark.slow_cases("*-Nested-", "int6-Cond-")
@pytest.mark.parametrize(
    ("make", "inputs"),
    [(mlp, (X,)), (Tied, (IDS,)), (NormalizedConv, IMAGES), (Cond, (X,)), (Nested, (X,))],
    ids=lambda one: getattr(one, "__name__", ""),
)
@pytest.mark.parametrize("narrow", [FP4, quantizer("int6{32}")], ids=["mxfp4", "int6"])
def test_the_slice_is_the_sliced_anchor(make, inputs, narrow):
    _, anchor, slice_ = prepared(make().train(), inputs, narrow)
    train([anchor, slice_], inputs)
    for model in (anchor, slice_):
        model.eval()
    with torch.no_grad():
        converted = pt2mx.convert_pt2e(slice_)
        sliced = slice_graph(pt2mx.convert_pt2e(anchor), narrow)
        assert torch.equal(converted(*inputs), slice_(*inputs))
        assert torch.equal(sliced(*inputs), slice_(*inputs))
    for one, other in zip(pt2mx.packed_weights(sliced), pt2mx.packed_weights(converted), strict=True):
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
        # the slice of a weight that is packed along two axes comes from two tensors
        assert one.name.removesuffix("_1") == other.name


def test_weights_are_quantized_twice_and_gradients_pass_through():
    exported, anchor, slice_ = prepared(mlp(), (X,), quantizer("mxfp4"), quantizer("mxint8"))
    for model in (anchor, slice_):
        assert {id(p) for p in model.parameters()} == {id(p) for p in exported.parameters()}
    weights = [p.detach() for p in exported.parameters() if p.dim() == 2]
    observers = [module for module in slice_.modules() if isinstance(module, MXFakeQuantize)]
    for weight, module in zip(weights, observers, strict=True):
        expected = fake_quantize_mx(fake_quantize_mx(weight, "mxint8"), "mxfp4")
        assert torch.equal(module(weight), expected) and not torch.equal(fake_quantize_mx(weight, "mxfp4"), expected)
        assert "sliced from mxint8{32}" in repr(module)
        x = weight.clone().requires_grad_()
        module(x).sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))
        module.disable_fake_quant()
        assert module(weight) is weight
        module.enable_fake_quant()
    assert torch.equal(copy.deepcopy(slice_)(X), slice_(X))


def test_the_report_has_the_noise_of_the_slice():
    _, anchor, slice_ = prepared(mlp(), (X,))
    sliced = torch.export.export(pt2mx.convert_pt2e(anchor), (X,))
    reports = [
        pt2mx.quantization_report(pt2mx.convert_pt2e(slice_)),
        pt2mx.quantization_report(pt2mx.slice_program(sliced, FP4).module()),
    ]
    noise = [
        [operand.statistics.sqnr for row in report.operators for operand in row.operands if operand.role == "weight"]
        for report in reports
    ]
    assert noise[0] == noise[1] and len(noise[0]) == 2


def test_weights_that_the_anchor_leaves_in_float():
    exported = torch.export.export(mlp(), (X,)).module()
    anchor = pt2mx.prepare_qat_pt2e(exported, quantizer("mxint8").set_module_name("0", None))
    slice_ = pt2mx.prepare_qat_pt2e(exported, quantizer("mxfp4"), anchor=anchor)
    anchors = {str(m.anchor) for m in slice_.modules() if isinstance(m, MXFakeQuantize)}
    assert anchors == {"None", "mxint8{32}"}
    assert torch.equal(slice_graph(pt2mx.convert_pt2e(anchor), quantizer("mxfp4"))(X), slice_(X))


@pytest.mark.parametrize(
    ("wide", "narrow", "message"),
    [
        (quantizer("mxfp4"), quantizer("mxfp8"), "0.weight is fp4_e2m1, and the recipe's fp8_e4m3 is wider: give"),
        (quantizer("mxint8"), quantizer("mxfp4{16}"), "0.weight has blocks of 32, and the recipe blocks of 16: slic"),
        (
            quantizer("int8{16}"),
            quantizer("nvfp4"),
            "0.weight in nvfp4_e2m1{16} is no slice of mxint8{16}: choose formats",
        ),
        (quantizer(None, "mxint8"), quantizer("mxfp4"), "the anchor quantizes none of the weights: prepare both from"),
    ],
)
def test_formats_that_are_no_slices(wide, narrow, message):
    with pytest.raises(MXError) as raised:
        prepared(mlp(), (X,), narrow, wide)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_an_anchor_that_is_not_prepared():
    exported = torch.export.export(mlp(), (X,)).module()
    with pytest.raises(MXError, match="anchor is a GraphModule: give what prepare_qat_pt2e returned"):
        pt2mx.prepare_qat_pt2e(exported, FP4, anchor=exported)
