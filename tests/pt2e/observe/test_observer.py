import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e import FakeQuantizeBase, ObserverBase

import pt2mx
from pt2mx import MXError, MXFakeQuantize, MXFormatObserver, MXObserver, fake_quantize_mx
from pt2mx.analysis.sums import QuantizationStatistics, quantization_sums
from tests.flow import calibrated, exported
from tests.models import module_of

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
    assert (observer.statistics.tensors, observer.statistics.values) == (2, 13 * 70)
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


@pytest.mark.parametrize("make", [MXObserver, MXFormatObserver])
def test_a_constant_tensor_is_not_observed_again_after_loading(make):
    observer, x = make(QSCHEME), torch.randn(4, 70)
    observer.observe_once = True
    observer(x)
    other = make(QSCHEME)
    other.observe_once = True
    other.load_state_dict(observer.state_dict())
    other(x)
    assert other.statistics == observer.statistics and other.statistics.tensors == 1


def test_empty_tensors_and_values_that_are_not_finite_are_counted():
    observer, x = MXObserver(QSCHEME), torch.randn(4, 70)
    x[1, 2], x[1, 40], x[3, 69] = math.inf, -math.inf, math.nan
    for batch in (x, torch.empty(0, 70), torch.empty(4, 0)):
        assert observer(batch) is batch
    seen = observer.statistics
    assert (seen.tensors, seen.empty, seen.values, seen.nonfinite, seen.nan_blocks) == (3, 2, 280, 3, 3)
    assert 10 < seen.sqnr < 30


def test_an_unknown_argument_of_with_args():
    with pytest.raises(MXError, match="unknown argument 'candidats' of MXFormatObserver"):
        MXFormatObserver.with_args(candidats=("mxfp4",))(qscheme=QSCHEME)


def test_flags_break_no_graph():
    torch._dynamo.reset()
    module = nn.Sequential(MXFakeQuantize(QSCHEME), nn.Linear(70, 4))
    x = torch.randn(3, 70)
    assert torch.allclose(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))


@pytest.mark.compiled
@pytest.mark.parametrize(("make", "backend"), [(MXObserver, "inductor"), (MXFormatObserver, "aot_eager")])
def test_observing_breaks_no_graph(make, backend, compiler):
    module, eager = make(QSCHEME), make(QSCHEME)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for x in (torch.randn(3, 70), torch.randn(5, 70), torch.randn(9, 70)):
        x[0, 0] = math.nan
        assert torch.equal(compiled(x).nan_to_num(), x.nan_to_num())
        eager(x)
    assert_same(module.statistics, eager.statistics)
    if make is MXFormatObserver:
        for name, seen in eager.candidate_statistics.items():
            assert_same(module.candidate_statistics[name], seen)


def assert_same(got, want):
    """Powers are summed in another order."""
    assert replace(got, sqnr=0) == replace(want, sqnr=0) and got.sqnr == pytest.approx(want.sqnr, rel=1e-9)


def test_a_model_without_observers_has_nothing_to_switch():
    for function in (pt2mx.enable_fake_quant, pt2mx.disable_fake_quant, pt2mx.enable_observer, pt2mx.disable_observer):
        with pytest.raises(MXError, match="holds no MX observer"):
            function(nn.Linear(2, 2))
        with pytest.raises(MXError, match="holds no MX observer"):
            function(None)


def test_there_are_no_qparams_to_calculate():
    with pytest.raises(MXError, match="each block's scale comes from its own values"):
        MXObserver(QSCHEME).calculate_qparams()


class Counting(MXObserver):
    """An observer of a user, whose `collect` takes the tensor alone."""

    seen = 0

    def collect(self, x):
        super().collect(x)
        self.seen += x.numel()


def pair(self, x):
    """Two layers of one input, whose weights share a tensor scale."""
    return self.a(x) + 20 * self.b(x)


def test_an_observer_of_a_user_measures_with_the_scale_that_is_used():
    x = torch.randn(6, 32)
    torch.manual_seed(0)
    graph = exported(module_of(pair, a=nn.Linear(32, 16), b=nn.Linear(32, 16)).eval(), x)
    own = dict.fromkeys(("weight", "activation"), Counting)
    configs = [pt2mx.MXQuantizationConfig(weight="nvfp4", activation="nvfp4", observer=o) for o in (own, None)]
    mine, plain = (calibrated(graph, pt2mx.MXQuantizer().set_global(config), x) for config in configs)
    pairs = [(a, b) for a, b in zip(mine.modules(), plain.modules(), strict=True) if isinstance(a, Counting)]
    assert [one.tensor_scale is None for one, _ in pairs].count(False) == 1  # of the input
    for one, other in pairs:
        assert one.seen == one.statistics.values and one.statistics == other.statistics
    pt2mx.enable_fake_quant(mine)
    assert torch.equal(pt2mx.convert_pt2e(mine)(x), mine(x))
