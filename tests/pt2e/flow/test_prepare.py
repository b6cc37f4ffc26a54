import copy

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXFakeQuantize, MXObserver, MXQuantizer, get_default_mx_quantization_config
from tests.flow import exported, train
from tests.graph import assert_unchanged, snapshot
from tests.models import IMAGES, NormalizedConv, chain, exported_conv, module_of, tied

QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config())


def test_observers_pass_through_until_told_otherwise():
    model = exported_conv()
    prepared = pt2mx.prepare_pt2e(model, QUANTIZER)
    want = model(*IMAGES)
    assert torch.allclose(prepared(*IMAGES), want, atol=1e-5)  # batch norm was folded
    observers = [m for m in prepared.modules() if type(m) is MXObserver]
    assert len(observers) == 4 and all(o.statistics is not None for o in observers)
    pt2mx.enable_fake_quant(prepared)
    quantized = prepared(*IMAGES)
    assert not torch.allclose(quantized, want, atol=1e-3)
    pt2mx.disable_fake_quant(prepared)
    assert torch.allclose(prepared(*IMAGES), want, atol=1e-5)


def test_the_callers_model_is_unchanged():
    model = exported_conv()
    before, want = snapshot(model), model(*IMAGES)
    prepared = pt2mx.prepare_pt2e(model, QUANTIZER)
    prepared(*IMAGES)
    pt2mx.convert_pt2e(prepared)
    assert_unchanged(model, before)
    assert torch.equal(model(*IMAGES), want)
    assert not any("mx_reason" in n.meta or "quantization_annotation" in n.meta for n in model.graph.nodes)


def test_a_failed_prepare_leaves_the_model_usable():
    class Broken(MXQuantizer):
        def annotate(self, model):
            super().annotate(model)
            for node in model.graph.nodes:
                node.meta.clear()
            raise MXError("no")

    model = exported_conv()
    before = snapshot(model)
    with pytest.raises(MXError, match="no"):
        pt2mx.prepare_pt2e(model, Broken().set_global(get_default_mx_quantization_config()))
    assert_unchanged(model, before)
    assert pt2mx.prepare_pt2e(model, QUANTIZER)(*IMAGES).shape == (2, 4)


def test_a_shared_weight_is_observed_once():
    inputs = (torch.randn(2, 8),)
    model = tied(chain(first=nn.Linear(8, 8, bias=False), second=nn.Linear(8, 8, bias=False)), "first", "second")
    prepared = pt2mx.prepare_pt2e(exported(model.eval(), *inputs), QUANTIZER)
    assert len([m for m in prepared.modules() if isinstance(m, MXObserver)]) == 3
    converted = pt2mx.convert_pt2e(prepared)
    assert len([n for n in converted.state_dict() if n.endswith("_data")]) == 1


def test_dead_code_is_not_quantized():
    def forward(self, x):
        self.unused(x)
        return self.used(x)

    inputs = (torch.randn(2, 8),)
    model = module_of(forward, used=nn.Linear(8, 8), unused=nn.Linear(8, 8))
    prepared = pt2mx.prepare_pt2e(exported(model.eval(), *inputs), QUANTIZER)
    assert len(pt2mx.quantization_report(prepared).operators) == 1


def lowered_again():
    """-> the export of a lowered model, whose linear layer reads packed weights."""
    x = torch.ones(4, 32)
    model = torch.export.export(nn.Linear(32, 32).eval(), (x,)).module()
    lowered = pt2mx.lower_to_inductor(pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, QUANTIZER)))
    return torch.export.export(lowered, (x,)).module()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: NormalizedConv(), "expected an exported graph, not NormalizedConv: pass torch.export.export"),
        (lambda: torch.export.export(NormalizedConv().eval(), IMAGES), "pass exported_program.module()"),
        (lambda: torch.fx.symbolic_trace(NormalizedConv()), "expected an exported graph"),
        (lambda: None, "expected an exported graph, not NoneType"),
        (lambda: pt2mx.prepare_pt2e(exported_conv(), QUANTIZER), "prepared already: calibrate"),
        (lambda: pt2mx.prepare_qat_pt2e(exported_conv(), QUANTIZER), "prepared already"),
        (lambda: pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported_conv(), QUANTIZER)), "converted already"),
        (lambda: lowered_again(), "converted already"),
    ],
)
@pytest.mark.parametrize("prepare", [pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e])
def test_what_cannot_be_prepared(prepare, model, message):
    with pytest.raises(MXError, match=message):
        prepare(model(), QUANTIZER)


@pytest.mark.parametrize("quantizer", [None, "mxfp4", MXQuantizer])
def test_what_is_no_quantizer(quantizer):
    with pytest.raises(MXError, match="expected an MXQuantizer"):
        pt2mx.prepare_pt2e(exported_conv(), quantizer)


def test_float64_is_refused_with_a_remedy():
    model = exported(nn.Linear(4, 4).double().eval(), torch.randn(2, 4, dtype=torch.float64))
    before = snapshot(model)
    with pytest.raises(MXError, match=r"linear computes in float64.*model.float\(\)"):
        pt2mx.prepare_pt2e(model, QUANTIZER)
    assert_unchanged(model, before)


def test_qat_trains_and_its_config_needs_no_flag():
    torch.manual_seed(0)
    model = exported(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).eval(), torch.randn(16, 8))
    prepared = pt2mx.prepare_qat_pt2e(model, QUANTIZER)
    assert {type(m) for m in prepared.modules() if isinstance(m, MXObserver)} == {MXFakeQuantize}
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    losses = train(prepared, x, steps=50, optimizer=torch.optim.Adam, target=y)
    assert losses[-1] < 0.3 * losses[0]
    converted = pt2mx.convert_pt2e(prepared)
    assert torch.equal(converted(x), prepared(x))


def test_qat_flag_of_the_config_serves_torchaos_own_prepare():
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(is_qat=True))
    prepared = prepare_qat_pt2e(exported(nn.Linear(4, 4).eval(), torch.randn(2, 4)), quantizer)
    assert {type(m) for m in prepared.modules() if isinstance(m, MXObserver)} == {MXFakeQuantize}


def test_state_dict_of_a_prepared_model():
    prepared = pt2mx.prepare_pt2e(exported_conv(), QUANTIZER)
    prepared(*IMAGES)
    pt2mx.enable_fake_quant(prepared)
    other = pt2mx.prepare_pt2e(exported_conv(), QUANTIZER)
    other.load_state_dict(prepared.state_dict())
    assert torch.equal(other(*IMAGES), prepared(*IMAGES))


def test_deepcopy_of_a_prepared_model():
    prepared = pt2mx.prepare_pt2e(exported_conv(), QUANTIZER)
    pt2mx.enable_fake_quant(prepared)
    copied = copy.deepcopy(prepared)
    assert torch.equal(copied(*IMAGES), prepared(*IMAGES))
    assert torch.equal(pt2mx.convert_pt2e(copied)(*IMAGES), prepared(*IMAGES))


def test_qat_converts_after_torchaos_switch_to_eval():
    """The switch replaces dropout, and its new node has the shape of its own example."""
    from torchao.quantization.pt2e import move_exported_model_to_eval

    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 10)).train()
    x = torch.randn(4, 64)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp4", "mxfp4"))
    prepared = pt2mx.prepare_qat_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    move_exported_model_to_eval(prepared)
    assert torch.equal(pt2mx.convert_pt2e(prepared)(x), prepared(x))


def test_what_trains_in_an_evaluated_model_is_named():
    sampling = module_of(lambda self, x: self.linear(torch.nn.functional.dropout(x, 0.5, True)), linear=nn.Linear(8, 8))
    model = exported(sampling.eval(), torch.randn(2, 8))
    with pytest.warns(UserWarning, match="^the exported model runs dropout in training mode, the prepared and"):
        pt2mx.prepare_pt2e(model, QUANTIZER)
