"""The totals of a report equal the bytes of the files of the float and the converted model."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchao.quantization.pt2e import quantize_pt2e

import pt2mx
from pt2mx import MXQuantizationConfig, MXQuantizer, quantization_report
from tests.flow import calibrated, convert, exported, reloaded, saved_bytes
from tests.models import chain, module_of, tied

FP4, FP8 = MXQuantizationConfig(weight="mxfp4"), MXQuantizationConfig(weight="mxfp8")
X = torch.randn(2, 64)
#: bytes of 64 x 64 values
FLOAT, IN_FP4, IN_FP8 = 4 * 4096, 64 * (32 + 2), 64 * (64 + 2)


def computed(self, x):
    """A weight of low rank."""
    return F.linear(x, self.a @ self.b)


def also_float(self, x):
    """A weight with another user."""
    return F.linear(x, self.weight) + self.weight.sum(0)


def views(self, x):
    """Buffers that share memory; the model reads all of it in float."""
    return F.linear(x, self.top) + F.linear(x, self.bottom) + self.whole.sum(0)[:64]


def parts(self, x):
    """Slices of a parameter, each the weight of a layer."""
    top, bottom = self.whole.chunk(2)
    return F.linear(F.linear(x, top), bottom)


def unused(self, x):
    """A layer that runs although nobody uses its result, and a constant."""
    self.other(x).tanh()
    return self.fc(x) * torch.tensor([2.0])


def joined_bias(self, x):
    """A bias that is a third of a parameter; conversion keeps only that third."""
    return F.linear(x, self.fc.weight, self.bias[1])


def branches(self, x):
    """A weight that is transposed in two subgraphs."""
    return torch.cond(x.sum() > 0, lambda x: x @ self.weight.t(), lambda x: (x + 1) @ self.weight.t(), (x,))


def square():
    return nn.Linear(64, 64, bias=False)


def parameter(*sizes):
    return nn.Parameter(torch.randn(sizes))


def of_views():
    whole = torch.randn(128, 64)
    buffers = {"whole": whole, "top": whole[:64], "bottom": whole[64:]}
    return module_of(views, **{name: nn.Buffer(tensor) for name, tensor in buffers.items()})


MODELS = {
    "computed": lambda: module_of(computed, a=parameter(64, 4), b=parameter(4, 64)),
    "also float": lambda: module_of(also_float, weight=parameter(64, 64)),
    "tied": lambda: tied(chain(first=square(), head=square()), "first", "head"),  # a weight in two formats
    "views": of_views,
    "parts": lambda: module_of(parts, whole=parameter(128, 64)),
    "unused": lambda: module_of(unused, fc=square(), other=square()),
    "joined bias": lambda: module_of(joined_bias, fc=square(), bias=parameter(3, 64)),
    "branches": lambda: module_of(branches, weight=parameter(64, 64)),
}
#: model -> values and bytes before, bytes after, and (before, after) of each weight's row
CASES = {
    "computed": (512, 4 * 512, IN_FP4, [(4 * 512, IN_FP4)]),
    "also float": (4096, FLOAT, FLOAT + IN_FP4, [(FLOAT, IN_FP4)]),
    "tied": (4096, FLOAT, IN_FP4 + IN_FP8, [(FLOAT, IN_FP4), (0, IN_FP8)]),
    "views": (8192, 2 * FLOAT, 2 * FLOAT + 2 * IN_FP4, [(FLOAT, IN_FP4)] * 2),
    "parts": (8192, 2 * FLOAT, 2 * IN_FP4, [(FLOAT, IN_FP4)] * 2),
    "unused": (8193, 2 * FLOAT + 4, IN_FP4 + 4, [(FLOAT, IN_FP4)]),
    "joined bias": (4096 + 192, FLOAT + 768, IN_FP4 + 256, [(FLOAT, IN_FP4)]),
    "branches": (4096, FLOAT, IN_FP4, [(FLOAT, IN_FP4), (0, 0)]),
}


def quantizer(kind):
    chosen = MXQuantizer().set_global(FP4)
    return chosen.set_module_name("head", FP8) if kind == "tied" else chosen


@pytest.mark.parametrize("kind", CASES)
def test_totals_are_the_bytes_of_the_files(kind):
    torch.manual_seed(0)
    x = torch.randn(2, 64)
    with torch.no_grad():
        program = torch.export.export(MODELS[kind]().eval(), (x,))
        prepared = pt2mx.prepare_pt2e(program.module(), quantizer(kind))
        converted = pt2mx.convert_pt2e(prepared)
        again = torch.export.export(converted, (x,))
    values, before, after, rows = CASES[kind]
    assert (saved_bytes(program), saved_bytes(again)) == (before, after)
    for model in (prepared, converted):
        report = quantization_report(model)
        assert (report.values, report.bytes_before, report.bytes_after) == (values, before, after)
        assert report.effective_bits == 8 * after / values
        weights = [o for operator in report.operators for o in operator.operands if o.role == "weight"]
        assert [(o.bytes_before, o.bytes_after) for o in weights] == rows
    # the float model follows from the tensors of a file, and from the names and shapes of the packed ones
    named = {"computed": (4096, FLOAT), "views": (4 * 4096, 4 * FLOAT)}
    named |= {"joined bias": (4096 + 64, FLOAT + 256), "unused": (4097, FLOAT + 4)}
    report = quantization_report(reloaded(again).module())
    assert (report.values, report.bytes_before, report.bytes_after) == (*named.get(kind, (values, before)), after)


def test_weights_that_are_not_folded_stay_in_float():
    graph = exported(MODELS["also float"]().eval(), torch.randn(2, 64))
    prepared = pt2mx.prepare_pt2e(graph, MXQuantizer().set_global(FP4))
    report = quantization_report(pt2mx.convert_pt2e(prepared, fold_quantize=False))
    assert (report.bytes_before, report.bytes_after) == (FLOAT, FLOAT)
    assert [(o.bytes_before, o.bytes_after) for o in report.operators[0].operands[1:2]] == [(FLOAT, FLOAT)]


def test_torchao_prepares_and_converts_a_model_of_the_same_sizes():
    graph = exported(MODELS["tied"]().eval(), torch.randn(2, 64))
    prepared = quantize_pt2e.prepare_pt2e(graph, quantizer("tied"))
    reports = [quantization_report(prepared)]
    reports.append(quantization_report(quantize_pt2e.convert_pt2e(prepared)))
    for report in reports:
        assert (report.values, report.bytes_before, report.bytes_after) == (4096, FLOAT, IN_FP4 + IN_FP8)


def test_a_batch_norm_that_is_folded_is_part_of_the_float_model():
    x = torch.randn(4, 32, 3, 3)
    for mode, prepare in ((False, pt2mx.prepare_pt2e), (True, pt2mx.prepare_qat_pt2e)):
        model = nn.Sequential(nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32)).train(mode)
        program = torch.export.export(model, (x,))
        prepared = prepare(program.module(), MXQuantizer().set_global(FP4))
        converted = pt2mx.convert_pt2e(prepared)
        unused = 0 if mode else 8  # evaluation does not read the number of batches
        files = saved_bytes(program) - unused, saved_bytes(torch.export.export(converted, (x,)))
        for report in map(quantization_report, (prepared, converted)):
            assert (report.bytes_before, report.bytes_after) == files


@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_an_optimized_model_is_as_large_in_float_as_before(preset):
    """Optimization folds the batch norm, and prunes the parameter that nothing uses."""
    torch.manual_seed(0)
    x, chosen = torch.randn(4, 32, 3, 3), MXQuantizer().set_global(FP4)
    model = nn.Sequential(nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32)).eval()
    model[0].unused = nn.Parameter(torch.ones(64))
    graph = exported(model, x)
    optimized = pt2mx.optimize(graph, chosen, [x], preset=preset)
    before = 4 * 32 * (32 + 4)
    for one in (graph, optimized):
        report = quantization_report(pt2mx.convert_pt2e(pt2mx.prepare_pt2e(one, chosen)))
        assert (report.values, report.bytes_before) == (before // 4, before)
    assert quantization_report(graph).bytes_before == before


@pytest.mark.compiled_except("formats2", "formats4")
@pytest.mark.parametrize(
    "formats", list(itertools.combinations(("mxfp4", "mxfp4{16}", "nvfp4", "fp4_e2m1{16}(f32)"), 2))
)
def test_a_loaded_program_counts_a_weight_in_two_formats_once(formats):
    first, head = (MXQuantizationConfig(weight=one) for one in formats)
    converted = convert(MODELS["tied"]().eval(), (X,), MXQuantizer().set_global(first).set_module_name("head", head))
    assert len([name for name, _ in converted.named_buffers() if "_data" in name]) == 2
    for model in (converted, reloaded(torch.export.export(converted, (X,))).module()):
        report = quantization_report(model)
        assert (report.values, report.bytes_before) == (4096, FLOAT)


def cast(self, x):
    """A weight in float32, and cast to bfloat16."""
    return F.linear(F.linear(x, self.weight).bfloat16(), self.weight.bfloat16())


def test_a_loaded_program_counts_a_weight_in_two_dtypes_once():
    model = module_of(cast, weight=nn.Parameter(torch.randn(64, 64)))
    converted = convert(model.eval(), (X,), MXQuantizer().set_global(FP4))
    report = quantization_report(reloaded(torch.export.export(converted, (X,))).module())
    assert (report.values, report.bytes_before) == (4096, FLOAT)


@pytest.mark.parametrize("spec", ["nvfp4", "mxfp4"])
def test_tensor_scales_are_no_part_of_the_float_model(spec):
    """Neither those of weights nor the static ones of activations."""
    config = MXQuantizationConfig(weight=spec, activation=spec)
    graph = exported(nn.Linear(64, 64, bias=False).eval(), X)
    converted = pt2mx.convert_pt2e(calibrated(graph, MXQuantizer().set_global(config), X))
    report = quantization_report(reloaded(torch.export.export(converted, (X,))).module())
    assert (report.values, report.bytes_before) == (4096, FLOAT)


def test_a_loaded_program_counts_a_rounded_weight_once():
    """One layer reads what `optimize` rounded, another operator the parameter."""
    chosen = MXQuantizer().set_global(FP4)
    optimized = pt2mx.optimize(exported(MODELS["also float"]().eval(), X), chosen, [X], preset="fast")
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(optimized, chosen))
    assert "weight_rounded_data" in dict(converted.named_buffers())
    report = quantization_report(reloaded(torch.export.export(converted, (X,))).module())
    assert (report.values, report.bytes_before) == (4096, FLOAT)
