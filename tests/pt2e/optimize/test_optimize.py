import copy

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer
from pt2mx.algorithms import GPTQ, Rotation, ScaleSearch
from tests.models import chain
from tests.optimized_models import W4, exported, net, quantized, rows


def test_outputs_come_nearer_and_the_model_stays():
    graph, batches, ids = net()
    state, code = copy.deepcopy(graph.state_dict()), graph.code
    quantizer = MXQuantizer().set_global(W4)
    optimized = pt2mx.optimize(graph, quantizer, batches)
    assert graph.code == code and all(torch.equal(state[name], t) for name, t in graph.state_dict().items())
    want = graph(ids)
    error = [(quantized(model, quantizer)(ids) - want).square().sum() for model in (graph, optimized)]
    assert error[1] < 0.75 * error[0]
    report = rows(optimized)
    assert list(report) == ["head.weight", "up.weight", "down.weight"]  # the tied weight once
    assert all(row.algorithm == "gptq" and row.after < 0.5 * row.before and not row.reason for row in report.values())
    assert report["head.weight"].modules == "embedding, head"


@pytest.mark.parametrize("preset", ["fast", "balanced"])
def test_weights_quantize_to_themselves_and_converted_is_prepared(preset):
    graph, batches, ids = net()
    for recipe in ("mxfp4", "mxfp4_weight_only", "mxfp6"):
        quantizer = MXQuantizer.from_recipe(recipe)
        optimized = pt2mx.optimize(graph, quantizer, batches, preset=preset)
        prepared = pt2mx.prepare_pt2e(optimized, quantizer)
        rounded = [row for row in rows(optimized).values() if row.algorithm]
        assert len(rounded) >= (2 if preset == "fast" else 3)
        for row in rounded:
            weight = optimized.get_parameter(row.weight)
            assert torch.equal(pt2mx.fake_quantize_mx(weight, row.spec), weight)
        pt2mx.enable_fake_quant(prepared)
        assert torch.equal(pt2mx.convert_pt2e(prepared)(ids), prepared(ids))
        assert not torch.equal(prepared(ids), graph(ids))


def test_algorithms_with_options():
    graph, batches, _ = net()
    quantizer = MXQuantizer().set_global(W4)
    weighted = rows(pt2mx.optimize(graph, quantizer, batches, algorithms=ScaleSearch(by_inputs=True)))
    assert "scales" in {row.algorithm for row in weighted.values()}
    assert all(row.after < row.before for row in weighted.values() if row.algorithm)
    by_gptq = rows(pt2mx.optimize(graph, quantizer, batches, algorithms=GPTQ()))
    assert all(by_gptq[name].after < row.after and not by_gptq[name].rotated for name, row in weighted.items())
    rotated = rows(pt2mx.optimize(graph, quantizer, batches, algorithms=Rotation(size=16)))
    assert {name: row.rotated for name, row in rotated.items()} == {
        "head.weight": 0,  # tied to the embedding, which reads it unquantized
        "up.weight": 16,
        "down.weight": 16,
    }
    assert all(row.reason == "GPTQ is not chosen, and no search of scales" for row in rotated.values())


def test_imatrix_takes_the_scales_of_least_weighted_error():
    """Against the definition: of the exponent of `even` and its neighbours, the first with the least error."""
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=False).eval().requires_grad_(False)
    nn.init.normal_(linear.weight)
    x = torch.randn(2000, 96) * (2 * torch.randn(96)).exp()  # independent channels of different sizes
    graph, importance = torch.export.export(linear, (x,)).module(), x.square().mean(0)
    spec = pt2mx.MXSpec("mxfp4", 32, 1)
    scale, _ = pt2mx.quantize_mx(linear.weight, spec.replace(scale_mode="even"))

    def of_scales(offset):
        unit = (2.0 ** (scale.float() - 127 + offset)).repeat_interleave(32, 1)
        magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        nearest = ((linear.weight / unit).abs().unsqueeze(-1) - magnitudes).abs().argmin(-1)
        return linear.weight.sign() * magnitudes[nearest] * unit

    def weighted(weight):
        return ((weight - linear.weight).square() * importance).unflatten(1, (3, 32)).sum(2)

    candidates = torch.stack([of_scales(offset) for offset in (0, -1, 1)])  # (3, 40, 96)
    best = torch.stack([weighted(candidate) for candidate in candidates]).argmin(0).repeat_interleave(32, 1)
    want = candidates.gather(0, best.unsqueeze(0)).squeeze(0)
    rounded = {}
    for preset in ("imatrix", "fast"):
        optimized = pt2mx.optimize(graph, MXQuantizer().set_global(W4), [(x,)], preset=preset)
        rounded[preset] = optimized.get_parameter("weight")
        (row,) = rows(optimized).values()
        assert (row.algorithm, row.rotated, row.smoothed) == ("scales", 0, "")
        assert len(optimized.graph.nodes) == len(graph.graph.nodes)
    assert torch.equal(rounded["imatrix"], want)
    error = {preset: float(weighted(weight).sum()) for preset, weight in rounded.items()}
    nearest = float(weighted(pt2mx.fake_quantize_mx(linear.weight, spec.replace(scale_mode="even"))).sum())
    assert error["imatrix"] < 0.9 * error["fast"] and error["imatrix"] < 0.9 * nearest, (error, nearest)
    with pytest.raises(MXError, match="there are none: give some"):
        pt2mx.optimize(graph, MXQuantizer().set_global(W4), preset="imatrix")


def test_the_algorithms_of_the_quantizer():
    graph, batches, _ = net()
    quantizer = MXQuantizer().set_global(W4).set_algorithms("fast")
    assert {row.algorithm for row in rows(pt2mx.optimize(graph, quantizer)).values()} == {"scales", ""}
    assert {row.algorithm for row in rows(pt2mx.optimize(graph, quantizer, batches, preset="balanced")).values()} == {
        "gptq"
    }


def test_in_place_the_memory_of_the_weights_is_used():
    graph, batches, ids = net()
    quantizer = MXQuantizer().set_global(W4)
    expected = pt2mx.optimize(graph, quantizer, batches)
    pointers = {tensor.data_ptr() for tensor in graph.parameters()}
    optimized = pt2mx.optimize(graph, quantizer, batches, in_place=True)
    assert pointers == {tensor.data_ptr() for tensor in optimized.parameters()}
    assert torch.equal(optimized(ids), expected(ids))
    with pytest.raises(MXError, match="give neither in_place nor group"):
        pt2mx.optimize(graph, quantizer, batches, preset="best", in_place=True)


def test_two_runs_give_the_same_bits():
    graph, batches, _ = net()
    first, second = (pt2mx.optimize(graph, MXQuantizer().set_global(W4), batches) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_an_optimized_model_optimized_again_stays():
    graph, batches, ids = net()
    quantizer = MXQuantizer().set_global(W4)
    optimized = pt2mx.optimize(graph, quantizer, batches)
    for preset in ("balanced", "fast"):
        again = pt2mx.optimize(optimized, quantizer, batches, preset=preset)
        assert torch.equal(again(ids), optimized(ids)) and len(again.graph.nodes) == len(optimized.graph.nodes)
        assert not any(row.algorithm for row in rows(again).values())


def test_an_optimized_model_can_be_exported_trained_and_saved(tmp_path):
    graph, batches, ids = net()
    quantizer = MXQuantizer().set_global(W4)
    optimized = pt2mx.optimize(graph, quantizer, batches)
    again = torch.export.export(optimized, (ids,))
    torch.export.save(again, tmp_path / "model.pt2")
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(ids), optimized(ids))
    qat = pt2mx.prepare_qat_pt2e(again.module(), quantizer)
    assert torch.equal(qat(ids), quantized(optimized, quantizer)(ids))
    assert all(p.requires_grad for p in qat.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "best of all"}, "unknown preset 'best of all': did you mean 'best'"),
        ({"preset": 3}, "unknown preset '3'|unknown preset 3"),
        ({"preset": "fast", "algorithms": GPTQ()}, "preset='fast' and algorithms say the same"),
        ({"algorithms": ("gptq",)}, "algorithms must be"),
        ({}, r"the algorithms read calibration batches, and there are none: give some .* the algorithms 'fast'"),
    ],
)
def test_bad_input(options, message):
    graph, *_ = net()
    with pytest.raises(MXError, match=message):
        pt2mx.optimize(graph, MXQuantizer().set_global(W4), **options)
    with pytest.raises(MXError, match=r"pass torch\.export\.export"):
        pt2mx.optimize(nn.Linear(4, 4), MXQuantizer().set_global(W4))
    with pytest.raises(MXError, match="expected an MXQuantizer, not str: make one with"):
        pt2mx.optimize(graph, "mxfp4")
    with pytest.raises(MXError, match=r"not one Tensor: pass \[batch\]"):
        pt2mx.optimize(graph, MXQuantizer().set_global(W4), torch.ones(2, 3))
    with pytest.raises(MXError, match=r"not one int: pass \[batch\]"):
        pt2mx.optimize(graph, MXQuantizer().set_global(W4), 5)
    with pytest.raises(MXError, match=r"could not run calibration batch 1: .*export the model with dynamic_shapes"):
        pt2mx.optimize(graph, MXQuantizer().set_global(W4), [torch.ones(2, 3, dtype=torch.int64)])
    with pytest.raises(MXError, match="no report of an optimization"):
        pt2mx.optimization_report(graph)


def test_in_place_of_memory_that_tensors_share():
    torch.manual_seed(0)
    model, x = chain(a=nn.Linear(64, 64), b=nn.Linear(64, 64)), torch.randn(4, 64)
    model.b.weight = nn.Parameter(model.a.weight.data.t())
    graph = exported(model, x)
    want = graph(x)
    rotated = pt2mx.optimize(graph, MXQuantizer().set_global(W4), algorithms=Rotation(), in_place=True)
    torch.testing.assert_close(rotated(x), want, rtol=1e-4, atol=1e-5)
