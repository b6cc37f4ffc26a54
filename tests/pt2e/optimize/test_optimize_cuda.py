import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.algorithms import gptq
from pt2mx.pt2e.optimize import calibrate, optimize

pytestmark = pytest.mark.cuda

QUANTIZER = pt2mx.MXQuantizer().set_global(pt2mx.get_default_mx_quantization_config(weight="mxfp4", activation=None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_a_gpu_is_rounded_as_on_the_cpu(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(16, 64, 3), nn.Flatten(1), nn.Linear(64 * 30, 256), nn.GELU(), nn.Linear(256, 10))
    model = model.eval().to(dtype)
    x = torch.randn(64, 16, 32, dtype=dtype)
    reports = []
    for device in ("cpu", "cuda"):
        graph = torch.export.export(model.to(device), (x.to(device),)).module()
        optimized = pt2mx.optimize(graph, QUANTIZER, [x.to(device)])
        assert all(tensor.device.type == device for tensor in optimized.parameters())
        reports.append(pt2mx.optimization_report(optimized).weights)
        want = graph(x.to(device)).float()
        error = [
            (pt2mx.convert_pt2e(pt2mx.prepare_pt2e(m, QUANTIZER))(x.to(device)).float() - want).square().sum()
            for m in (graph, optimized)
        ]
        assert error[1] < 0.6 * error[0]
    for on_cpu, on_gpu in zip(*reports, strict=True):
        assert on_gpu.algorithm == "gptq" and on_gpu.after == pytest.approx(on_cpu.after, rel=0.1)


def test_gptq_agrees_with_the_cpu():
    torch.manual_seed(0)
    weight, x = torch.randn(64, 256), torch.randn(1000, 256) @ torch.randn(256, 256)
    hessian, spec = x.T @ x, pt2mx.MXSpec("mxfp4", 32)
    on_cpu, on_gpu = gptq(weight, hessian, spec), gptq(weight.cuda(), hessian.cuda(), spec).cpu()
    loss = [((weight - q) @ hessian * (weight - q)).sum() for q in (on_cpu, on_gpu)]
    assert loss[1] == pytest.approx(loss[0], rel=0.02) and (on_cpu == on_gpu).float().mean() > 0.9


def test_sums_that_the_gpu_has_no_room_for_lie_on_the_host(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1024)).eval()
    x = torch.randn(1024, 64, device="cuda")
    graph = torch.export.export(model.cuda(), (x,)).module()
    want = pt2mx.optimize(graph, QUANTIZER, [x])
    homes, placed = [], calibrate.observe

    def observe(*args):
        actual = placed(*args)
        homes.extend(part.device.type for observer in actual.inputs.values() for part in observer.parts)
        return actual

    monkeypatch.setattr(calibrate, "_LEAST_BUDGET", 0)
    monkeypatch.setattr(optimize, "observe", observe)
    actual = pt2mx.optimize(graph, QUANTIZER, [x])
    assert homes == ["cuda", "cpu"]
    for one, other in zip(actual.parameters(), want.parameters(), strict=True):
        assert (one == other).float().mean() > 0.97  # the order of sums differs
