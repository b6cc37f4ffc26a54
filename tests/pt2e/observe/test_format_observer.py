import copy
import warnings

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import (
    MXError,
    MXFakeQuantize,
    MXFormatObserver,
    MXObserver,
    MXQuantizationConfig,
    MXQuantizer,
    fake_quantize_mx,
)
from pt2mx.analysis.sums import QuantizationStatistics, quantization_sums
from pt2mx.pt2e.observe.range_observers import MXMinMaxObserver
from tests.models import IMAGES, exported_conv

QSCHEME = ("mx", "fp8_e4m3", 32, 1, "floor", "even")
OBSERVER = MXFormatObserver.with_args(candidates=("mxfp4", "MXFP6[E2M3]{16}", "mxint8(rceil)"))
CONFIG = MXQuantizationConfig(weight="mxfp8", activation="mxfp8", observer=OBSERVER)


def observers(model):
    return [m for m in model.modules() if isinstance(m, MXObserver)]


def test_every_candidate_along_the_axis_of_the_annotation():
    observer = MXFormatObserver(QSCHEME, candidates=("mxfp4", "mxfp6{16}"))
    assert observer.candidate_statistics == {}
    batches = [torch.randn(4, 70, 3), torch.randn(2, 70, 3)]
    for x in batches:
        assert observer(x) is x
    assert list(observer.candidate_statistics) == ["mxfp4_e2m1{32}", "mxfp6_e2m3{16}"]
    for name, seen in [(str(observer.spec), observer.statistics), *observer.candidate_statistics.items()]:
        sums = [quantization_sums(x, pt2mx.parse(name, axis=1)) for x in batches]
        assert seen == QuantizationStatistics.from_sums({k: sums[0][k] + sums[1][k] for k in sums[0]})
    observer.reset_statistics()
    assert observer.statistics is None and observer.candidate_statistics == {}


def test_the_annotations_spec_is_what_fake_quantization_applies():
    observer, x = MXFormatObserver(QSCHEME), torch.randn(4, 70)
    observer.enable_fake_quant()
    assert torch.equal(observer(x), fake_quantize_mx(x, "mxfp8", axis=1))
    assert list(observer.candidate_statistics) == [
        "mxfp4_e2m1{32}", "mxfp6_e2m3{32}", "mxfp8_e4m3{32}", "mxint8{32}",
    ]  # fmt: skip


def test_state_dict_deepcopy_and_other_candidates():
    observer = MXFormatObserver(QSCHEME, candidates=("mxfp4", "mxfp6"))
    observer(torch.randn(4, 70))
    other = MXFormatObserver(QSCHEME, candidates=("mxfp4", "mxfp6"))
    other.load_state_dict(observer.state_dict())
    for same in (other, copy.deepcopy(observer)):
        assert same.candidate_statistics == observer.candidate_statistics and same.statistics == observer.statistics
    with pytest.raises(RuntimeError, match="mxint8"):
        MXFormatObserver(QSCHEME, candidates=("mxfp4", "mxint8")).load_state_dict(observer.state_dict())


def test_prepare_inserts_what_the_config_asks_for():
    prepared = pt2mx.prepare_pt2e(exported_conv(), MXQuantizer().set_global(CONFIG))
    inserted = observers(prepared)
    assert {type(o) for o in inserted} == {MXFormatObserver} and len(inserted) == 4
    for _ in range(2):
        prepared(*IMAGES)
    for observer in inserted:
        assert {c.spec.axis for c in observer.candidates.values()} == {observer.spec.axis}
        values = {s.values for s in observer.candidate_statistics.values()}
        assert values == {observer.statistics.values}
        assert observer.statistics.tensors == (1 if observer.observe_once else 2)
    assert sum(o.observe_once for o in inserted) == 2


def test_convert_applies_the_annotation_and_keeps_the_candidates():
    plain = MXQuantizationConfig(weight="mxfp8", activation="mxfp8")
    models = [pt2mx.prepare_pt2e(exported_conv(), MXQuantizer().set_global(c)) for c in (CONFIG, plain)]
    for model in models:
        model(*IMAGES)
        pt2mx.enable_fake_quant(model)
    converted, want = (pt2mx.convert_pt2e(model) for model in models)
    with torch.no_grad():
        assert torch.equal(converted(*IMAGES), models[0](*IMAGES)) and torch.equal(converted(*IMAGES), want(*IMAGES))
    assert converted.state_dict().keys() == want.state_dict().keys()
    for model in (models[0], converted):
        weight = pt2mx.quantization_report(model).operators[1].operands[1]
        assert list(weight.candidates) == ["mxfp4_e2m1{32}", "mxfp6_e2m3{16}", "mxint8{32}(rceil)"]
        sums = quantization_sums(exported_conv().get_parameter("fc.weight").detach(), pt2mx.parse("mxfp4"))
        assert weight.candidates["mxfp4_e2m1{32}"] == QuantizationStatistics.from_sums(sums)


class Training(MXFakeQuantize):
    """A fake quantization of the user's own."""


@pytest.mark.parametrize(
    ("observer", "inserted", "replaced"),
    [
        (None, {MXFakeQuantize}, ""),
        (MXObserver.with_args(fake_quant=True, observe=False), {MXFakeQuantize}, ""),
        (Training, {Training}, ""),
        (OBSERVER, {MXFakeQuantize}, "MXFormatObserver"),
        ({"activation": Training, "weight": MXMinMaxObserver}, {Training, MXFakeQuantize}, ""),
    ],
)
def test_training_names_the_observers_that_it_replaces(observer, inserted, replaced):
    config = MXQuantizationConfig(weight="mxfp8", activation="mxfp8", observer=observer)
    graph = exported_conv()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        prepared = pt2mx.prepare_qat_pt2e(graph, MXQuantizer().set_global(config))
    assert [f"instead of {replaced}, which" in str(one.message) for one in told] == [True] * bool(replaced)
    assert all(one.filename == __file__ for one in told)
    assert {type(o) for o in observers(prepared)} == inserted
    assert all(o.fake_quant_enabled and not o.observer_enabled for o in observers(prepared))


@pytest.mark.compiled
def test_a_compiled_prepared_model_collects(compiler):
    prepared = pt2mx.prepare_pt2e(exported_conv(), MXQuantizer().set_global(CONFIG))
    torch.compile(prepared, backend="aot_eager")(*IMAGES)
    assert all(len(o.candidate_statistics) == 3 for o in observers(prepared))


def test_a_recipe_drops_the_observer():
    again = MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp8", activation="mxfp8"))
    assert MXQuantizer().set_global(CONFIG).to_recipe() == again.to_recipe()


@pytest.mark.parametrize(
    ("observer", "message"),
    [
        (nn.Linear, "observer=.* must be MXObserver, a subclass"),
        (7, "observer=7 must be"),
        (lambda **fields: MXObserver(**fields), "must be MXObserver"),
        (MXFormatObserver.with_args(candidates=("mxpf4",)), "did you mean 'mxfp4"),
        (MXFormatObserver.with_args(candidates=()), "names no format"),
        (MXFormatObserver.with_args(candidates="mxfp4"), "must be several formats"),
        (MXFormatObserver.with_args(candidates=7), "must be several formats"),
        (MXFormatObserver.with_args(candidates=("BFP[8|5]{32}",)), "E8M0 scales"),
        (MXObserver.with_args(candidates=("mxfp4",)), "unknown argument 'candidates' of MXObserver"),
    ],
)
def test_bad_observers_are_refused_by_the_config(observer, message):
    with pytest.raises(MXError, match=message):
        MXQuantizationConfig(weight="mxfp8", observer=observer)
