import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pt2mx
from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config
from pt2mx.pt2e.optimize import calibrate
from pt2mx.pt2e.optimize.observers import MXHessianObserver, Size
from tests.models import chain, module_of
from tests.optimized_models import W4, correlated, exported, quantized, rows


def test_batches_stay_where_the_model_writes_its_input():
    x = correlated(16, 64)
    writes = module_of(lambda self, x: self.linear(x.mul_(2)), linear=nn.Linear(64, 8))
    graph, before = exported(writes, x.clone()), x.clone()
    assert rows(pt2mx.optimize(graph, MXQuantizer().set_global(W4), [x]))["linear.weight"].algorithm == "gptq"
    assert torch.equal(x, before)


def test_what_no_observer_reads_is_not_computed():
    x = correlated(128, 64)
    head = module_of(
        lambda self, x: self.head(self.linear(x)).softmax(1), linear=nn.Linear(64, 8), head=nn.Linear(8, 4)
    )
    model = exported(head, x)
    quantizer = MXQuantizer().set_module_name("linear", W4)
    expected = rows(pt2mx.optimize(model, quantizer, [x]))["linear.weight"]
    with torch.no_grad():
        model.get_parameter("head.weight").fill_(float("nan"))
    calls = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Calls():
        assert rows(pt2mx.optimize(model, quantizer, [x]))["linear.weight"] == expected
    assert torch.ops.aten.baddbmm_.default in calls and torch.ops.aten.softmax.int not in calls
    assert torch.ops.aten._softmax.default not in calls


def test_batches_by_name():
    x = correlated(16, 64)
    scaled = module_of(lambda self, x, scale=None: self.linear(x) * scale, linear=nn.Linear(64, 8))
    graph = exported(scaled, x, scale=torch.ones(1))
    optimized = pt2mx.optimize(graph, MXQuantizer().set_global(W4), [{"x": x, "scale": torch.ones(1)}])
    assert rows(optimized)["linear.weight"].algorithm == "gptq"


def test_an_input_that_is_written_between_its_consumers():
    def forward(self, x):
        x = x.clone()
        row = x[:1]
        y = self.first(x)
        row.mul_(100)
        return y + self.second(x)

    torch.manual_seed(0)
    model, x = module_of(forward, first=nn.Linear(64, 64), second=nn.Linear(64, 64)).eval(), correlated(32, 64)
    optimized = pt2mx.optimize(exported(model, x), MXQuantizer().set_global(W4), [x])
    later = torch.cat([x[:1] * 100, x[1:]])
    for name, seen in (("first", x), ("second", later)):
        exact = seen @ getattr(model, name).weight.detach().T
        off = exact - seen @ optimized.get_parameter(f"{name}.weight").detach().T
        assert rows(optimized)[f"{name}.weight"].after == pytest.approx(
            float(off.square().sum() / exact.square().sum()), rel=1e-3
        )


def test_padding_is_left_out():
    torch.manual_seed(0)
    model, mask = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval(),
        torch.zeros(8, 16, dtype=torch.long),
    )
    mask[:, :4] = 1

    x = torch.where(mask.bool().unsqueeze(2), correlated(8, 16, 64), 10 * torch.randn(64))
    net = module_of(lambda self, x, mask: self.model(x) * mask.unsqueeze(2), model=model)
    graph, quantizer = exported(net, x, mask), MXQuantizer().set_global(W4)
    plain, masked = (pt2mx.optimize(graph, quantizer, [(x, mask)], padding_mask=name) for name in (None, "mask"))
    want = graph(x, mask)
    error = [(quantized(one, quantizer)(x, mask) - want).square().sum() for one in (plain, masked)]
    assert error[1] < 0.8 * error[0]
    with pytest.raises(MXError, match="padding_mask='masks' is no input of the model: did you mean 'mask'"):
        pt2mx.optimize(graph, quantizer, [(x, mask)], padding_mask="masks")
    with pytest.raises(MXError, match=r"padding_mask='x' is torch\.float32 of shape \(8, 16, 64\): it must be"):
        pt2mx.optimize(graph, quantizer, [(x, mask)], padding_mask="x")


def test_few_inputs_do_not_teach_noise():
    torch.manual_seed(0)
    model, x, other = nn.Linear(256, 64).eval(), torch.randn(64, 256), torch.randn(2048, 256)
    quantizer = MXQuantizer().set_global(W4)
    graph = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},)).module()
    near, optimized = (quantized(g, quantizer) for g in (graph, pt2mx.optimize(graph, quantizer, [x])))
    errors = [(g(other) - model(other)).square().sum() for g in (near, optimized)]
    assert errors[1] < 1.2 * errors[0]


def test_a_weight_in_parts(monkeypatch):
    monkeypatch.setattr(calibrate, "MOST_COLUMNS", 64)
    torch.manual_seed(0)
    model, x = nn.Linear(150, 16).eval(), correlated(512, 150)
    spec = pt2mx.MXSpec("mxfp4", 48)  # 48 columns a part: whole blocks
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight=spec, activation=None))
    optimized = pt2mx.optimize(exported(model, x), quantizer, [x])
    (row,) = pt2mx.optimization_report(optimized).weights
    assert row.algorithm == "gptq" and row.after < 0.8 * row.before


def test_sums_that_exceed_the_device_budget_go_to_the_host():
    sizes = [Size(1, k, k, 32) for k in (64, 512, 128)]
    for on_device, on_host, homes in ((100_000, 2 << 20, [None, "cpu", None]), (2 << 20, 0, [None] * 3)):
        placed = [MXHessianObserver(lambda x: x, size.line) for size in sizes]
        calibrate._place(placed, sizes, on_device, on_host)
        assert [one.home and one.home.type for one in placed] == homes
        assert {one.columns for one in placed} == {4096}
    # 64 and 128 fit together; the third fits on the host only in parts
    placed = [MXHessianObserver(lambda x: x, size.line) for size in sizes]
    calibrate._place(placed, sizes, 100_000, 600_000)
    assert {one.columns for one in placed} == {256} and placed[1].home == torch.device("cpu")


def test_a_module_may_have_any_name():
    x = correlated(64, 64)
    optimized = pt2mx.optimize(exported(chain(hessian_1=nn.Linear(64, 8)), x), MXQuantizer().set_global(W4), [x])
    assert rows(optimized)["hessian_1.weight"].algorithm == "gptq"
