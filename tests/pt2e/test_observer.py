import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import FakeQuantizeBase, ObserverBase

import pt2mx
from pt2mx import MXError, MXFakeQuantize, MXObserver, fake_quantize_mx
from pt2mx.statistics import QuantizationStatistics, quantization_sums

QSCHEME = ("mx", "fp4_e2m1", 32, 1, "floor", "even")


def test_observer_passes_through_and_collects():
    observer = MXObserver(QSCHEME)
    assert observer.statistics is None
    batches = [torch.randn(4, 70), torch.randn(9, 70)]
    for x in batches:
        assert observer(x) is x
    sums = [quantization_sums(x, observer.spec) for x in batches]
    total = {name: sums[0][name] + sums[1][name] for name in sums[0]}
    assert observer.statistics == QuantizationStatistics.from_sums(total)
    observer.reset_statistics()
    assert observer.statistics is None


def test_switches():
    observer, x = MXObserver(QSCHEME), torch.randn(4, 70)
    observer.enable_fake_quant()
    observer.disable_observer()
    assert torch.equal(observer(x), fake_quantize_mx(x, observer.spec)) and observer.statistics is None
    observer.disable_fake_quant()
    observer.enable_observer()
    assert observer(x) is x and observer.statistics.values == x.numel()


def test_fake_quantize_trains_straight_through():
    module, x = MXFakeQuantize(QSCHEME), torch.randn(4, 70, requires_grad=True)
    y = module(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(y, fake_quantize_mx(x, module.spec)) and torch.equal(x.grad, torch.ones_like(x))
    assert module.statistics is None


def test_the_gradient_is_clipped_where_the_annotation_says_so():
    module, x = MXFakeQuantize((*QSCHEME, "clipped")), torch.full((1, 32), 1.0)
    x[0, 0] = 7.9  # beyond 6 * 2**0, the largest value of its block
    x.requires_grad_()
    module(x).sum().backward()
    assert x.grad.tolist() == [[0.0] + [1.0] * 31]


def test_torchao_knows_the_classes():
    assert isinstance(MXObserver(QSCHEME), ObserverBase)
    assert isinstance(MXFakeQuantize(QSCHEME), FakeQuantizeBase)
    model = nn.Sequential(MXFakeQuantize(QSCHEME))
    from torchao.quantization.pt2e import disable_fake_quant

    model.apply(disable_fake_quant)
    assert model[0].fake_quant_enabled is False
    made = MXObserver.with_args(qscheme=QSCHEME, observe=False)(dtype=torch.uint8, quant_min=None, is_dynamic=False)
    assert made.observer_enabled is False and made.spec == MXObserver(QSCHEME).spec


def test_state_dict_carries_flags_and_statistics():
    observer = MXObserver(QSCHEME)
    observer(torch.randn(4, 70))
    observer.enable_fake_quant()
    state = observer.state_dict()
    assert state["fake_quant_enabled"].tolist() == [1] and state["observer_enabled"].tolist() == [1]
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    other = MXObserver(QSCHEME, observe=False)
    other.load_state_dict(state)
    assert other.fake_quant_enabled is True and other.observer_enabled is True
    assert other.statistics == observer.statistics


def test_flags_break_no_graph():
    torch._dynamo.reset()
    module = nn.Sequential(MXFakeQuantize(QSCHEME), nn.Linear(70, 4))
    x = torch.randn(3, 70)
    assert torch.allclose(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))


def test_observing_breaks_no_graph():
    torch._dynamo.reset()
    module, x = MXObserver(QSCHEME), torch.randn(3, 70)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), x)
    assert module.statistics.values == x.numel()


def test_a_model_without_observers_has_nothing_to_switch():
    for function in (pt2mx.enable_fake_quant, pt2mx.disable_fake_quant, pt2mx.enable_observer, pt2mx.disable_observer):
        with pytest.raises(MXError, match="holds no MX observer"):
            function(nn.Linear(2, 2))


def test_there_are_no_qparams_to_calculate():
    with pytest.raises(MXError, match="each block's scale comes from its own values"):
        MXObserver(QSCHEME).calculate_qparams()
