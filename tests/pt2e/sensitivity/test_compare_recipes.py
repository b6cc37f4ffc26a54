import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.quantizer import recipe
from pt2mx.pt2e.report import speed
from pt2mx.pt2e.sensitivity.compare_recipes import OTHER_FORMATS, compare_recipes
from tests.models import module_of

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture(scope="module")
def net(few_objects):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Linear(64, 10)).eval()
    batches = [torch.randn(32, 64) for _ in range(3)]
    return torch.export.export(model, (batches[0],)).module(), batches


def by_hand(exported, name):
    prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe(name))
    return pt2mx.convert_pt2e(prepared)


@pytest.mark.compiled
def test_numbers_are_those_of_the_flow(net):
    exported, batches = net
    actual = compare_recipes(exported, batches[1:], ["mxfp4", "mxfp8"], metric="kl")
    rows = {row.name: row for row in actual.rows}
    for name in ("mxfp4", "mxfp8"):
        converted, totals = by_hand(exported, name), []
        for x in batches[1:]:
            got, want = (F.log_softmax(m(x).double(), -1) for m in (converted, exported))
            totals.append((want.exp() * (want - got)).sum(-1).mean().item())
        assert math.isclose(rows[name].quality, sum(totals) / 2, rel_tol=1e-9)
        report = pt2mx.quantization_report(converted)
        assert (rows[name].bytes, rows[name].bits) == (report.bytes_after, report.effective_bits)
        saved = sum(t.nbytes for t in [*converted.parameters(), *converted.buffers()])
        assert rows[name].bytes == saved
    assert (rows["float"].bytes, rows["float"].bits, rows["float"].quality) == (report.bytes_before, 32, 0)
    assert actual.metric == "divergence, nats" and not actual.larger_is_better
    assert [row.name for row in actual.front()] == ["mxfp4", "mxfp8", "float"]


def test_memory_that_the_float_model_shows_twice_counts_once():
    x, whole = torch.randn(4, 32), torch.randn(64, 32)
    halves = {"top": nn.Buffer(whole[:32]), "whole": nn.Buffer(whole)}
    model = module_of(lambda self, x: F.linear(x, self.top) + self.whole.sum(), **halves)
    actual = compare_recipes(torch.export.export(model, (x,)).module(), [x], ["mxfp4"], metric="cosine")
    (row,) = (row for row in actual.rows if row.name == "float")
    assert (row.bytes, row.bits) == (4 * 64 * 32, 32)


@pytest.mark.parametrize(("metric", "at_float"), [("cosine", 1.0), ("noise", math.inf)])
def test_qualities_are_better_where_they_are_larger(net, metric, at_float):
    exported, batches = net
    actual = compare_recipes(exported, batches, ["mxfp4", "mxint8"], metric=metric)
    assert actual.larger_is_better
    four, eight, whole = (row.quality for row in actual.rows)
    assert four < eight < whole and math.isclose(whole, at_float)
    if metric == "cosine":
        cosines = [F.cosine_similarity(by_hand(exported, "mxfp4")(x), exported(x)) for x in batches]
        assert math.isclose(four, torch.cat(cosines).mean().item(), rel_tol=1e-6)


@pytest.mark.parametrize("metric", ["cosine", "noise"])
def test_the_interval_is_of_the_samples(net, metric):
    exported, batches = net
    row, whole = compare_recipes(exported, batches, ["mxfp4"], metric=metric).rows
    got, want = (torch.cat([m(x) for x in batches]).double() for m in (by_hand(exported, "mxfp4"), exported))
    if metric == "cosine":
        each = 1 - F.cosine_similarity(got, want)
        expected = 2 * each.std().item() / math.sqrt(96)
    else:
        noise, signal = (got - want).square().sum(-1), want.square().sum(-1)
        each = noise.mean() / signal.mean() * (1 - signal / signal.mean()) + noise / signal.mean()
        half = 2 * each.std().item() / math.sqrt(96)
        expected = 10 * math.log10(1 + half / each.mean().item())
    assert len(row.samples) == len(whole.samples) == 96 and math.isnan(whole.error)
    assert row.samples == pytest.approx(each.tolist(), rel=1e-6) and row.error == pytest.approx(expected, rel=1e-6)
    assert whole.tied == "", "float is better than the recipe"


@pytest.mark.compiled
def test_all_recipes_and_formats_and_the_stages(net):
    exported, batches = net
    stages = []
    actual = compare_recipes(exported, batches[1:], calibration=batches[:1], stage=stages.append)
    names = [*recipe.names(), *OTHER_FORMATS]
    assert stages == ["float", *names] and {row.name for row in actual.rows} == {"float", *names}
    assert not any(row.note for row in actual.rows)  # nor a warning about settings for other models
    rows = {row.name: row for row in actual.rows}
    assert rows["mxfp4_decoder"].quality > rows["mxfp4_weight_only"].quality  # GPTQ


def test_a_recipe_that_fails_is_a_row(net):
    exported, batches = net
    nothing = pt2mx.MXQuantizer().set_module_name("0", None)
    needs_batches = pt2mx.MXQuantizer.from_recipe("mxfp4").set_algorithms("balanced")
    arguments = {"nothing": nothing, "needs": needs_batches, "works": pt2mx.MXQuantizer.from_recipe("mxfp8")}
    rows = {row.name: row for row in compare_recipes(exported, batches, arguments).rows}
    assert rows["nothing"].note == "it selects no operator of the model" and math.isnan(rows["nothing"].quality)
    assert "batches" in rows["needs"].note and rows["works"].quality > 0.99 and not rows["works"].note


def test_a_users_metric_and_a_program(net):
    exported, batches = net

    def largest(got, want):
        return (got - want).abs().max()

    program = torch.export.export(exported, (batches[0],))
    actual = compare_recipes(program, batches[:1], ["mxfp8"], metric=largest)
    difference = (by_hand(exported, "mxfp8")(batches[0]) - exported(batches[0])).abs().max().item()
    assert actual.metric == "largest" and math.isclose(actual.rows[0].quality, difference, rel_tol=1e-6)


def test_models_that_are_quantized_are_refused(net):
    exported, batches = net
    prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer.from_recipe("mxfp8"))
    for model, text in ((prepared, "is prepared already"), (by_hand(exported, "mxfp8"), "is converted already")):
        with pytest.raises(MXError, match=text):
            compare_recipes(model, batches, ["mxfp4"])


def test_a_users_loss(net):
    exported, batches = net
    labels = exported(batches[0]).argmax(-1)

    def loss(got, want):
        return F.cross_entropy(got, labels).item()

    actual = compare_recipes(exported, batches[:1], ["mxfp4"], metric=loss)
    rows = {row.name: row.quality for row in actual.rows}
    assert math.isclose(rows["float"], loss(exported(batches[0]), None)) and rows["mxfp4"] != rows["float"]
    with pytest.raises(MXError, match=r"the metric gave 'good': it must give a number"):
        compare_recipes(exported, batches, ["mxfp4"], metric=lambda got, want: "good")


def test_the_model_stays_as_it_is(net):
    exported, batches = net
    before, code, mode = {n: t.clone() for n, t in exported.state_dict().items()}, exported.code, exported.training
    compare_recipes(exported, batches, ["mxfp4", "mxfp4_decoder"], calibration=batches)
    assert exported.code == code and exported.training == mode
    assert all(torch.equal(t, before[name]) for name, t in exported.state_dict().items())


def check_speed(actual):
    """Check that the float model in both dtypes and the recipe were timed, and which time each row shows."""
    assert list(actual.speed.rounds) == ["bfloat16", "float32", "mxfp8"] and not actual.speed.failures
    times = {row.name: row.milliseconds for row in actual.rows}
    assert times == {row: actual.speed.milliseconds(of).median for row, of in (("mxfp8",) * 2, ("float", "float32"))}


class Compiled:
    """Models that `torch.compile` is called for, and what it returns: the model, which moves the clock."""

    def __init__(self):
        self.models, self.inputs, self.now = [], [], 0.0

    def compile(self, model):
        self.models.append(model)
        index = len(self.models)

        def call(*args, **kwargs):
            self.now += 0.1 * index  # the first is the fastest
            self.inputs.append((args, kwargs))
            return model(*args, **kwargs)

        return call


@pytest.fixture
def compiled(monkeypatch):
    compiled = Compiled()
    monkeypatch.setattr(torch, "compile", compiled.compile)
    monkeypatch.setattr(speed.SpeedTest.run, "__defaults__", (lambda: compiled.now,))
    return compiled


def test_recipes_are_timed_beside_the_float_model_in_both_dtypes(net, compiled):
    exported, batches = net
    stages = []
    actual = compare_recipes(exported, batches, ["mxfp8", "mxfp4"], speed=True, stage=stages.append)
    assert stages == ["float", "mxfp8", "mxfp4", "speed"]
    dtypes = [{tensor.dtype for tensor in model.parameters()} for model in compiled.models]
    assert dtypes[:2] == [{torch.bfloat16}, {torch.float32}]
    assert all("linear_mx" in model.code for model in compiled.models[2:]) and len(compiled.models) == 4
    assert [args[0].dtype for args, _ in compiled.inputs[-4:]] == [torch.bfloat16, *3 * [torch.float32]]
    assert {row.name: round(row.milliseconds) for row in actual.rows} == {"mxfp8": 300, "mxfp4": 400, "float": 200}
    text = str(actual)
    assert "3.0x slower than bfloat16, 1.5x slower than float32" in text
    assert "smaller than float; here it is 3.0x slower than bfloat16, 1.5x slower than float32." in text
    rows = json.loads(actual.to_json())["speed"]["rows"]
    assert [row["name"] for row in rows] == ["bfloat16", "float32", "mxfp8", "mxfp4"]
    assert exported(batches[0]).dtype == torch.float32


def test_a_model_in_bfloat16_is_the_row_of_its_dtype(compiled):
    x = torch.randn(8, 64).bfloat16()
    exported = torch.export.export(nn.Linear(64, 8).bfloat16().eval(), (x,)).module()
    actual = compare_recipes(exported, [x], ["mxfp8"], speed=True)
    assert {row.name: round(row.milliseconds) for row in actual.rows} == {"mxfp8": 300, "float": 100}


def test_a_recipe_that_does_not_compile_keeps_its_quality(net, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model: 1 / 0)
    actual = compare_recipes(*net, ["mxfp8"], speed=True)
    row = next(row for row in actual.rows if row.name == "mxfp8")
    assert row.quality > 0.99 and math.isnan(row.milliseconds) and not row.note
    assert set(actual.speed.failures) == {"bfloat16", "float32", "mxfp8"}
    assert "here it is" not in str(actual) and "ZeroDivisionError" in str(actual)


@pytest.mark.compiled
def test_speed(net, compiler):
    actual = compare_recipes(*net, ["mxfp8"], speed=True)
    check_speed(actual)


@pytest.mark.compiled
def test_speed_with_inputs_by_name(compiler):
    batch = {"x": torch.randn(4, 64), "mask": torch.ones(4, 8)}
    masked = module_of(lambda self, x, *, mask: self.linear(x) * mask, linear=nn.Linear(64, 8))
    exported = torch.export.export(masked.eval(), (batch["x"],), {"mask": batch["mask"]}).module()
    for arguments in (batch, tuple(batch.values())):
        check_speed(compare_recipes(exported, [arguments], ["mxfp8"], speed=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": nn.Linear(1, 1)}, r"model must be a GraphModule, and is a module"),
        ({"batches": []}, r"there is no batch to compare the recipes on"),
        ({"batches": torch.ones(2, 32, 64)}, r"batches is one of type Tensor: give a list of batches"),
        ({"batches": [torch.ones(2, 64)]}, r"the model does not run on inputs of shape \(2, 64\)"),
        ({"calibration": torch.ones(32, 64)}, r"calibration is one of type Tensor: give a list of batches"),
        ({"recipes": ["mxfp8", "x" * 5000]}, r"no recipe 'xxx"),
        ({"batches": [(1, 2)]}, r"the model takes input: give each of them once, not 2 values"),
        (
            {"batches": [torch.full((32, 64), math.nan)]},
            r"the float model's outputs hold NaN or Inf, no value, or zeros alone",
        ),
        ({"metric": "cos"}, r"metric='cos' is unknown: did you mean 'cosine'"),
        ({"metric": 3}, r"metric must be one of kl, cosine, noise, or a function, not int"),
        (
            {"recipes": ["mxfp5"]},
            r"no recipe 'mxfp5': no file, shipped recipe or format: did you mean 'mxfp",
        ),
        ({"recipes": []}, r"there is no recipe to compare"),
        ({"recipes": "mxfp4"}, r"recipes='mxfp4' must be a list of names, or a dict of quantizers"),
        ({"recipes": {"a": "mxfp4"}}, r"the recipe 'a' must be an MXQuantizer, not str"),
        ({"recipes": {"float": pt2mx.MXQuantizer()}}, r"'float' is the float model"),
        ({"recipes": {"bfloat16": pt2mx.MXQuantizer()}}, r"'bfloat16' is the float model"),
    ],
)
def test_errors(net, options, text):
    arguments = {"model": net[0], "batches": net[1], **options}
    with pytest.raises(MXError, match=text):
        compare_recipes(
            arguments.pop("model"), arguments.pop("batches"), arguments.pop("recipes", ["mxfp8"]), **arguments
        )
