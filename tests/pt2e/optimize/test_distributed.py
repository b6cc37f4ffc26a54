import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer, get_default_mx_quantization_config
from pt2mx.pt2e.optimize import distributed
from tests.rank_processes import results_of_ranks

QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config(weight="mxfp4", activation=None))

NVFP4 = MXQuantizer().set_global(get_default_mx_quantization_config(weight="nvfp4", activation=None))


class Branches(nn.Module):
    """The second layer sees rows only where the flag is set, none on the second rank."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 48), nn.Linear(64, 48), nn.Linear(48, 8)
        self.columns = nn.Parameter(torch.randn(64, 48).T)  # not contiguous
        self.table = nn.Embedding(32, 48)
        self.image = nn.Conv2d(64, 32, 2).to(memory_format=torch.channels_last)

    def forward(self, x, chosen):
        y = self.first(x).index_add(0, chosen, self.table(chosen))
        y = y + nn.functional.linear(x, self.columns)
        z = self.image(x.T.reshape(1, 64, 4, 8)).mean()
        return z + self.last(torch.relu(y.index_add(0, chosen, self.second(x[chosen]))))


def model():
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=0, max=64)
    args = torch.randn(32, 64), torch.arange(5)
    return torch.export.export(Branches().eval(), args, dynamic_shapes=({}, {0: rows})).module()


def batches():
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(64, 64, generator=generator) / 8
    actual = [torch.randn(32, 64, generator=generator) @ mixing for _ in range(6)]
    return [(x, torch.arange(20) if i < 3 else torch.arange(0)) for i, x in enumerate(actual)]


def calibrate(rank):
    distributed._AT_ONCE = 1  # the last of six weights is exchanged alone; this process ends after the test
    local = batches()[3 * rank : 3 * rank + 3]
    optimized = pt2mx.optimize(model(), QUANTIZER, local, group=dist.group.WORLD)
    report = [(w.weight, w.algorithm, w.before, w.after) for w in pt2mx.optimization_report(optimized).weights]
    try:
        pt2mx.optimize(model(), QUANTIZER, local if rank else [], group=dist.group.WORLD)
    except MXError as error:
        message = str(error)
    codes = dict(pt2mx.optimize(model(), NVFP4, local, group=dist.group.WORLD).named_buffers())
    return dict(optimized.named_parameters()), report, message, codes


@pytest.mark.compiled
def test_two_ranks_give_the_same_result_as_one():
    first, second = results_of_ranks(calibrate)
    want = pt2mx.optimize(model(), QUANTIZER, batches())
    for name, tensor in want.named_parameters():
        assert torch.equal(first[0][name], second[0][name])
        assert (first[0][name] == tensor).float().mean() > 0.97  # the order of sums differs
    assert first[1] == second[1] and [row[1] for row in first[1]] == ["gptq"] + ["scales"] + ["gptq"] * 4
    for row, alone in zip(first[1], pt2mx.optimization_report(want).weights, strict=True):
        assert row[0] == alone.weight and row[2:] == pytest.approx((alone.before, alone.after), rel=0.02)
    assert first[3].keys() == second[3].keys() and "first.weight_tensor_scale" in first[3]
    assert all(torch.equal(tensor, second[3][name]) for name, tensor in first[3].items())
    assert "there are none" in first[2] and first[2] == second[2]  # no rank waits forever


def test_threads_round_small_weights_as_one_thread_does(monkeypatch):
    graph, threads, used = model(), torch.get_num_threads(), set()
    monkeypatch.setattr(distributed, "_AT_ONCE", 2)
    find = pt2mx.pt2e.optimize.rounding.reason_not_rounded

    def note_thread(target):
        used.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return find(target)

    monkeypatch.setattr("pt2mx.pt2e.optimize.rounding.reason_not_rounded", note_thread)
    try:
        torch.set_num_threads(2)
        many = pt2mx.optimize(graph, QUANTIZER, batches())
        assert used == {(False, 1)} and torch.get_num_threads() == 2
        monkeypatch.setattr(distributed, "_SMALL", 0)
        used.clear()
        one = pt2mx.optimize(graph, QUANTIZER, batches())
    finally:
        torch.set_num_threads(threads)
    assert used == {(True, 2)}
    assert pt2mx.optimization_report(many).weights == pt2mx.optimization_report(one).weights
    assert all(map(torch.equal, many.parameters(), one.parameters()))


def test_an_error_in_a_thread_is_raised_and_threads_stay(monkeypatch):
    def fail(*args):
        raise MXError("no such weight")

    monkeypatch.setattr("pt2mx.pt2e.optimize.optimize.round_weight", fail)
    threads = torch.get_num_threads()
    with pytest.raises(MXError, match="no such weight"):
        pt2mx.optimize(model(), QUANTIZER, batches())
    assert torch.get_num_threads() == threads


def test_inference_tensors_are_rounded():
    graph = model()
    want = pt2mx.optimize(graph, QUANTIZER, batches())
    with torch.inference_mode():
        result = pt2mx.optimize(graph, QUANTIZER, batches())
    assert all(map(torch.equal, result.parameters(), want.parameters()))
