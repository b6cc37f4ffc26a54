"""Our quantizer with torchao's prepare and convert, which only fold weights of torchao's operators."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import quantize_pt2e as torchao

from pt2mx import (
    MXFakeQuantize,
    MXQuantizer,
    convert_pt2e,
    disable_observer,
    enable_fake_quant,
    get_default_mx_quantization_config,
    prepare_pt2e,
    prepare_qat_pt2e,
)
from tests.flow import exported
from tests.graph import quantized_at_each_call
from tests.models import OF_EACH_KIND, TwoLayers, module_of


@pytest.mark.diagonal
@pytest.mark.parametrize("name", OF_EACH_KIND)
@pytest.mark.parametrize("qat", [False, True], ids=["calibrated", "trained"])
def test_prepare_and_convert_of_torchao_with_our_quantizer(name, qat):
    """torchao's prepare and ours, torchao's convert and ours: the same numbers and folded weights, a tied one once."""
    make, x, _ = OF_EACH_KIND[name]
    config = get_default_mx_quantization_config("mxfp4", "mxfp8", is_qat=qat)
    for prepare in (torchao.prepare_pt2e, prepare_qat_pt2e if qat else prepare_pt2e):
        model = make()
        if name == "gated":
            model.second.weight = model.first.weight
        prepared = prepare(exported(model, x), MXQuantizer().set_global(config))
        with torch.no_grad():
            prepared(x)
            enable_fake_quant(prepared)
            disable_observer(prepared)
            want = prepared(x)
            assert any(isinstance(module, MXFakeQuantize) for module in prepared.modules()) == qat
            fused = prepare is prepare_qat_pt2e and name == "convolution"
            for convert in (convert_pt2e, *([] if fused else [torchao.convert_pt2e])):
                converted = convert(copy.deepcopy(prepared))
                state = converted.state_dict()
                assert torch.equal(converted(x), want)
                assert not quantized_at_each_call(converted)
                assert not [key for key, t in state.items() if t.is_floating_point() and t.dim() > 1]
                codes = [key for key in state if key.endswith("_data")]
                assert len(codes) == {"linear": 2, "convolution": 2, "gated": 3}[name]


def test_torchaos_convert_says_where_it_leaves_weights_in_float():
    """A batch norm that pt2mx has fused for training is folded by its own convert alone."""
    make, x, _ = OF_EACH_KIND["convolution"]
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp4", "mxfp8"))
    prepared = prepare_qat_pt2e(exported(make(), x), quantizer)
    with torch.no_grad():
        want = prepared(x)
        with pytest.warns(UserWarning, match=r"folds no batch norm .* convert with pt2mx.convert_pt2e"):
            converted = torchao.convert_pt2e(copy.deepcopy(prepared))
        assert torch.equal(converted(x), want) and "4.weight_data" in converted.state_dict()


def test_a_float_weight_that_something_else_reads_stays_in_torchaos_convert():
    penalized = module_of(lambda self, x: (self.layer(x), self.layer.weight.square().sum()), layer=nn.Linear(64, 8))
    x, model = torch.randn(4, 64), penalized
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp8", "mxfp8"))
    converted = torchao.convert_pt2e(torchao.prepare_pt2e(exported(model, x), quantizer))
    assert {"layer.weight", "layer.weight_data", "layer.weight_scale"} <= set(converted.state_dict())
    assert torch.equal(converted(x)[1], model(x)[1])


def test_weights_are_folded_where_torchao_folds_none_too():
    """Matmuls of activations among them."""
    x, quantizer = torch.randn(2, 4, 32), MXQuantizer().set_global(get_default_mx_quantization_config())
    prepared, ours = (
        prepare(exported(TwoLayers().eval(), x), quantizer) for prepare in (torchao.prepare_pt2e, prepare_pt2e)
    )
    ours.load_state_dict(prepared.state_dict(), strict=False)
    enable_fake_quant(ours)
    converted = torchao.convert_pt2e(prepared, fold_quantize=False)
    assert not quantized_at_each_call(converted) and torch.equal(converted(x), ours(x))
