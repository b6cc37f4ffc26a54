"""The range of an observer's values; the numbers equal the numbers of `MXObserver`."""

import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXObserver
from pt2mx.pt2e.observe.range_observers import (
    RANGE_KEY,
    MXHistogramObserver,
    MXMinMaxObserver,
    MXMovingAverageMinMaxObserver,
    ValueRange,
)
from tests.models import chain

QSCHEME = ("mx", "fp4_e2m1", 32, 1, "floor", "even")
KINDS = (MXMinMaxObserver, MXMovingAverageMinMaxObserver, MXHistogramObserver)
BATCHES = [torch.tensor(b) for b in ([[1.0, -2.0]], [[5.0, math.nan]], [[-math.inf, 0.5]], [[math.inf, math.nan]])]


def shown(observer, batches=BATCHES):
    for x in batches:
        assert observer(x) is x
    return observer


def test_least_and_largest_finite_value():
    observer = MXMinMaxObserver(QSCHEME)
    assert observer.value_range is None and observer.statistics_meta() == {}
    shown(observer)
    assert (observer.min_val.tolist(), observer.max_val.tolist()) == ([-2.0], [5.0])
    assert observer.statistics_meta()[RANGE_KEY] == observer.value_range == ValueRange((-2.0,), (5.0,))
    observer(torch.empty(0, 2))
    observer.reset_statistics()
    assert observer.value_range is None and observer.statistics is None


def test_a_range_for_each_channel():
    observer = shown(MXMinMaxObserver(QSCHEME, ch_axis=-1), [torch.tensor([[1.0, -2.0], [3.0, 4.0]]), BATCHES[1]])
    assert observer.value_range == ValueRange((1.0, -2.0), (5.0, 4.0))
    other = MXMinMaxObserver(QSCHEME, ch_axis=-1)
    other.load_state_dict(observer.state_dict())
    assert other.value_range == observer.value_range
    line = MXMinMaxObserver(("mx", "int8", 32, 0, "floor", "even"), ch_axis=0)
    assert shown(line, [torch.tensor([1.0, -2.0]), torch.tensor([0.0, 3.0])]).value_range == ValueRange(
        (0.0, -2.0), (1.0, 3.0)
    )
    with pytest.raises(MXError, match=r"ch_axis=2 is out of range for a tensor of shape \(1, 2\)"):
        MXMinMaxObserver(QSCHEME, ch_axis=2)(BATCHES[0])


def test_moving_average_as_torch_ao_has_it():
    ours = MXMovingAverageMinMaxObserver(QSCHEME, averaging_constant=0.25)
    theirs = torch.ao.quantization.MovingAverageMinMaxObserver(averaging_constant=0.25)
    for x in torch.randn(5, 4, 32).unbind():
        ours(x), theirs(x)
    assert torch.allclose(ours.min_val, theirs.min_val) and torch.allclose(ours.max_val, theirs.max_val)
    before = ours.value_range
    ours(BATCHES[3])  # nothing finite
    assert ours.value_range == before


def test_histogram_counts_every_finite_value_in_any_order():
    observer = MXHistogramObserver(QSCHEME, bins=8)
    shown(observer, [torch.tensor([[0.1, -0.1, 0.9]]), torch.tensor([[0.0, math.inf]])])
    # bins of 1/4 from -1 to 1
    assert (observer.limit, observer.histogram.tolist()) == (1.0, [0, 0, 0, 1, 2, 0, 0, 1])
    observer(torch.tensor([[3.0, -4.0]]))  # of 2 from -8 to 8
    assert (observer.limit, observer.histogram.tolist()) == (8.0, [0, 0, 1, 1, 3, 1, 0, 0])
    assert observer.value_range.histogram == tuple(observer.histogram.tolist())
    batches = [torch.randn(3, 32) * 10.0**k for k in (-30, 4, 0, 37, -44)]
    seen = [shown(MXHistogramObserver(QSCHEME), order) for order in (batches, batches[::-1])]
    assert torch.equal(seen[0].histogram, seen[1].histogram) and int(seen[0].histogram.sum()) == 5 * 96
    every = torch.cat(batches).double()
    edges = torch.linspace(-seen[0].limit, seen[0].limit, 2049, dtype=torch.float64)
    assert torch.equal(seen[0].histogram, torch.histogram(every, edges)[0].long())


def test_a_histogram_of_zeros_and_of_nothing_finite():
    observer = shown(MXHistogramObserver(QSCHEME, bins=4), [torch.zeros(1, 3), BATCHES[3]])
    assert observer.histogram.tolist() == [0, 0, 3, 0]
    observer.reset_statistics()
    assert observer.histogram.tolist() == [0, 0, 0, 0] and observer.value_range is None


@pytest.mark.parametrize("make", KINDS)
def test_statistics_and_numbers_are_those_of_mx_observer(make):
    plain, observer, x = MXObserver(QSCHEME), make(QSCHEME, eps=2**-12, reduce_range=True), torch.randn(4, 70)
    plain(x), observer(x)
    assert observer.statistics == plain.statistics
    plain.enable_fake_quant(), observer.enable_fake_quant()
    assert torch.equal(observer(x), plain(x))
    other = make(QSCHEME)
    other.load_state_dict(observer.state_dict())
    assert other.value_range == observer.value_range and other.statistics == observer.statistics


@pytest.mark.compiled
@pytest.mark.parametrize("make", KINDS)
def test_observing_breaks_no_graph(make, compiler):
    module, eager = make(QSCHEME), make(QSCHEME)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for x in (torch.randn(3, 70), torch.randn(5, 70) * 100):
        compiled(x), eager(x)
    assert module.value_range == eager.value_range


def test_observers_by_role_go_through_the_flow():
    observers = {"activation": MXHistogramObserver.with_args(bins=64), "weight": MXMinMaxObserver.with_args(ch_axis=0)}
    config = pt2mx.MXQuantizationConfig("mxint8", "mxint8", bias="mxint8", observer=observers)
    model, x = chain(a=nn.Linear(32, 32), b=nn.Linear(32, 4)).eval(), torch.randn(5, 32)
    program = torch.export.export(model, (x,))
    prepared = pt2mx.prepare_pt2e(program.module(), pt2mx.MXQuantizer().set_global(config))
    prepared(x)
    kinds = [type(m) for m in prepared.modules() if isinstance(m, MXObserver)]
    assert (
        sorted(k.__name__ for k in kinds) == ["MXHistogramObserver"] * 2 + ["MXMinMaxObserver"] * 2 + ["MXObserver"] * 2
    )
    converted = pt2mx.convert_pt2e(prepared)
    ranges = [n.meta[RANGE_KEY] for n in converted.graph.nodes if RANGE_KEY in n.meta]
    weights = [r for r in ranges if not r.histogram]
    assert [len(r.least) for r in weights] == [32, 4]
    assert weights[1].least == tuple(model.b.weight.amin(1).tolist())
    assert [sum(r.histogram) for r in ranges if r.histogram] == [160, 160]
    plain = pt2mx.MXQuantizer().set_global(pt2mx.MXQuantizationConfig("mxint8", "mxint8", bias="mxint8"))
    assert torch.equal(converted(x), pt2mx.convert_pt2e(pt2mx.prepare_pt2e(program.module(), plain))(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MXMinMaxObserver(QSCHEME, ch_axis="0"), "ch_axis='0' must be an integer"),
        (lambda: MXMovingAverageMinMaxObserver(QSCHEME, averaging_constant=0), "averaging_constant=0 must be above 0"),
        (lambda: MXMovingAverageMinMaxObserver(QSCHEME, averaging_constant="1"), "must be a number above 0"),
        (lambda: MXHistogramObserver(QSCHEME, bins=7), "bins=7 must be an even number"),
        (lambda: MXHistogramObserver(QSCHEME, bims=8), "unknown argument 'bims' of MXHistogramObserver"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(MXError, match=message):
        make()
