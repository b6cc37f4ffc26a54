import copy
import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config
from pt2mx.pt2e.optimize import hessian_observer

W4 = get_default_mx_quantization_config(weight="mxfp4", activation=None)


def exported(model, *args, **kwargs):
    return torch.export.export(model.eval(), args, kwargs).module()


def correlated(*shape):
    mixing = torch.randn(shape[-1], shape[-1], generator=torch.Generator().manual_seed(1)) / shape[-1] ** 0.5
    return torch.randn(shape) @ mixing


def quantized(graph, quantizer):
    return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(graph, quantizer))


def rows(model):
    return {row.weight: row for row in pt2mx.optimization_report(model).weights}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.down(torch.relu(self.up(x))))


def net():
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (8, 16))
    return exported(Net(), ids), [(torch.randint(0, 50, (8, 16)),) for _ in range(4)], ids


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


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.grouped, self.last = nn.Conv2d(16, 32, 3, stride=2, groups=2), nn.ConvTranspose2d(32, 8, 2)

    def forward(self, x):
        return self.last(torch.relu(self.grouped(torch.relu(self.norm(self.first(x))))))


def test_convolutions_with_their_batch_norms():
    torch.manual_seed(0)
    model = Convolutions()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0.5, 2)
    smooth = nn.functional.avg_pool2d(torch.randn(8, 3, 24, 24), 5, 1, 2) * 5
    graph = exported(model, smooth)
    quantizer = MXQuantizer().set_global(W4)
    optimized = pt2mx.optimize(graph, quantizer, [smooth.flip(-1), (smooth,)])
    torch.testing.assert_close(pt2mx.optimize(graph, MXQuantizer().set_global(None), [smooth])(smooth), graph(smooth))
    report = rows(optimized)
    assert [row.algorithm for row in report.values()] == ["gptq", "gptq", ""]
    assert report["last.weight"].reason == (
        "no product whose input is observed reads it; scales of least error gain nothing over rounding to nearest"
    )
    assert not any("batch_norm" in node.name for node in optimized.graph.nodes)
    want = graph(smooth)
    error = [(quantized(model, quantizer)(smooth) - want).square().sum() for model in (graph, optimized)]
    assert error[1] < 0.6 * error[0]


class Shared(nn.Module):
    """One linear layer for two inputs, one weight in two formats, one that a plain operator reads too, and a constant
    chain."""

    def __init__(self):
        super().__init__()
        self.twice, self.plain = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.weight = nn.Parameter(torch.randn(64, 32))

    def forward(self, x):
        y = self.twice(self.twice(x))
        y = self.plain(y) + self.plain.weight.sum()
        return y @ (self.weight * 2)


def test_weights_that_are_shared():
    torch.manual_seed(0)
    x = correlated(32, 64)
    graph = exported(Shared(), x)
    quantizer = MXQuantizer().set_global(W4)
    optimized = pt2mx.optimize(graph, quantizer, [x])
    report = rows(optimized)
    assert [row.algorithm for row in report.values()] == ["gptq"] * 3
    # what else reads a weight goes on to read the float one
    assert torch.equal(optimized.get_parameter("plain.weight"), graph.get_parameter("plain.weight"))
    assert {"plain.weight_rounded", "weight_rounded"} == set(dict(optimized.named_buffers()))
    assert {"plain.weight", "twice.weight", "twice.bias"} == set(dict(optimized.named_parameters()))
    want = graph(x)
    error = [(quantized(model, quantizer)(x) - want).square().sum() for model in (graph, optimized)]
    assert error[1] < error[0]


def test_reasons():
    torch.manual_seed(0)
    x = correlated(16, 64)
    graph = exported(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), x)
    ceil = get_default_mx_quantization_config(weight=pt2mx.MXSpec("mxfp4", scale_mode="ceil"), activation=None)
    optimized = pt2mx.optimize(graph, MXQuantizer().set_global(ceil).set_module_name("0", W4), [x])
    report = rows(optimized)
    assert report["0.weight"].algorithm == "gptq"
    assert report["1.weight"].algorithm == "" and "ceil would quantize" in report["1.weight"].reason
    assert math.isnan(report["1.weight"].before) and "nan" not in pt2mx.optimization_report(optimized).to_table()
    assert torch.equal(optimized.get_parameter("1.weight"), graph.get_parameter("1.weight"))
    bad = pt2mx.optimize(graph, MXQuantizer().set_global(W4), [x, torch.full_like(x, float("inf"))])
    assert all("Inf or a NaN" in row.reason and row.algorithm == "scales" for row in rows(bad).values())
    table = pt2mx.optimization_report(optimized).to_table().splitlines()
    assert table[0].split()[:3] == ["weight", "format", "algorithm"] and len(table) == 3


class Weight(nn.Module):
    """x @ weight.T"""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("factors", [(1e30, 1), (1e-35, 1), (1, 1e17), (1, 1e-20)])
def test_values_whose_squares_leave_the_range(factors):
    weight, x = torch.randn(16, 64) * factors[0], correlated(256, 64) * factors[1]
    optimized = pt2mx.optimize(exported(Weight(weight), x), MXQuantizer().set_global(W4), [x])
    row = rows(optimized)["weight"]
    assert row.algorithm == "gptq" and 0 < row.after < 0.7 * row.before < 0.05


def test_weights_that_cannot_be_rounded():
    x = correlated(16, 64)
    broken = torch.randn(16, 64)
    broken[3, 5] = float("nan")
    for weight, reason in ((broken, "it holds an Inf or a NaN"), (torch.randn(0, 64), "it is empty")):
        optimized = pt2mx.optimize(exported(Weight(weight), x), MXQuantizer().set_global(W4), [x])
        assert rows(optimized)["weight"].reason == reason
        assert torch.equal(optimized.get_parameter("weight").nan_to_num(), weight.nan_to_num())  # the NaN is one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models(dtype):
    torch.manual_seed(0)
    x = correlated(32, 64).to(dtype)
    graph = exported(nn.Linear(64, 64).to(dtype), x)
    optimized = pt2mx.optimize(graph, MXQuantizer().set_global(W4), [x])
    row = rows(optimized)["weight"]
    assert optimized.get_parameter("weight").dtype == dtype and row.algorithm == "gptq" and row.after < 0.5 * row.before


def test_batches_by_name():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 8)

        def forward(self, x, scale=None):
            return self.linear(x) * scale

    x = correlated(16, 64)
    graph = exported(Scaled(), x, scale=torch.ones(1))
    optimized = pt2mx.optimize(graph, MXQuantizer().set_global(W4), [{"x": x, "scale": torch.ones(1)}])
    assert rows(optimized)["linear.weight"].algorithm == "gptq"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "best of all"}, "unknown preset 'best of all': allowed: fast, balanced"),
        ({}, "batches is empty: give batches of inputs, or preset='fast'"),
    ],
)
def test_bad_input(options, message):
    graph, *_ = net()
    with pytest.raises(MXError, match=message):
        pt2mx.optimize(graph, MXQuantizer().set_global(W4), **options)
    with pytest.raises(MXError, match=r"pass torch\.export\.export"):
        pt2mx.optimize(Net(), MXQuantizer().set_global(W4))
    with pytest.raises(MXError, match="expected an MXQuantizer, not str"):
        pt2mx.optimize(graph, "mxfp4")
    with pytest.raises(MXError, match=r"not one Tensor: pass \[batch\]"):
        pt2mx.optimize(graph, MXQuantizer().set_global(W4), torch.ones(2, 3))
    with pytest.raises(MXError, match="no report of an optimization"):
        pt2mx.optimization_report(graph)


def test_an_input_that_is_written_between_its_readers():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = x.clone()
            row = x[:1]
            y = self.first(x)
            row.mul_(100)
            return y + self.second(x)

    torch.manual_seed(0)
    model, x = Written().eval(), correlated(32, 64)
    optimized = pt2mx.optimize(exported(model, x), MXQuantizer().set_global(W4), [x])
    later = torch.cat([x[:1] * 100, x[1:]])
    for name, seen in (("first", x), ("second", later)):
        exact = seen @ getattr(model, name).weight.detach().T
        off = exact - seen @ optimized.get_parameter(f"{name}.weight").detach().T
        assert rows(optimized)[f"{name}.weight"].after == pytest.approx(
            float(off.square().sum() / exact.square().sum()), rel=1e-3
        )


def test_a_weight_in_parts(monkeypatch):
    monkeypatch.setattr(hessian_observer, "_COLUMNS", 64)
    torch.manual_seed(0)
    model, x = nn.Linear(150, 16).eval(), correlated(512, 150)
    spec = pt2mx.MXSpec("mxfp4", 48)  # 48 columns a part: whole blocks
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight=spec, activation=None))
    optimized = pt2mx.optimize(exported(model, x), quantizer, [x])
    (row,) = pt2mx.optimization_report(optimized).weights
    assert row.algorithm == "gptq" and row.after < 0.8 * row.before


def test_few_inputs_do_not_teach_noise():
    torch.manual_seed(0)
    model, x, other = nn.Linear(256, 64).eval(), torch.randn(64, 256), torch.randn(2048, 256)
    quantizer = MXQuantizer().set_global(W4)
    graph = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},)).module()
    near, optimized = (quantized(g, quantizer) for g in (graph, pt2mx.optimize(graph, quantizer, [x])))
    errors = [(g(other) - model(other)).square().sum() for g in (near, optimized)]
    assert errors[1] < 1.2 * errors[0]
