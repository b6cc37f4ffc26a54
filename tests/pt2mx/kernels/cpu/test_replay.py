"""A replay computes what its calls compute, in the memory of their results."""

import pytest
import torch
from torch import Tensor

from pt2mx import ops
from pt2mx.kernels.cpu.prepared import PreparedActivation, PreparedAttention, PreparedCall
from pt2mx.kernels.cpu.replay import Call, OperatorCall, Replay
from tests.threads import on_threads

OPTIONS = "none", "int8", 32, "even", "even"


def call_of(prepared: PreparedCall, *tensors: Tensor, out: Tensor) -> Call:
    kernel = prepared.kernel()
    return Call(kernel.address, True, kernel.arguments(*prepared.numbers(tensors, out)), kernel)


@pytest.fixture
def quantize():
    x, y, z = (torch.zeros(4, 64) for _ in range(3))
    prepared = PreparedActivation((4, 64), x.dtype, x.dtype, *OPTIONS)
    add = OperatorCall(torch.ops.aten.add.Tensor, (y, y), {}, [z])
    return x, z, [call_of(prepared, x, out=y), add, call_of(prepared, z, out=z)]


def test_kernels_and_operators_in_order(quantize):
    x, z, calls = quantize
    replay = Replay(calls, (x, z))
    for _ in range(2):
        x.normal_()
        assert replay()
        twice = 2 * torch.ops.pt2mx.activation_fake_quantize_mx(x, *OPTIONS)
        assert torch.equal(z, torch.ops.pt2mx.activation_fake_quantize_mx(twice, *OPTIONS))


def test_another_number_of_threads(quantize):
    x, z, calls = quantize
    replay = Replay(calls, (x, z))
    assert on_threads(replay, torch.get_num_threads() + 1) == [False] and not z.any()
    assert replay()


def test_another_state_of_torch(quantize):
    """Code that was compiled outside of autocast, or without gradients, is other code."""
    x, z, calls = quantize
    with torch.no_grad():
        replay = Replay(calls, (x, z))
        with torch.autocast("cpu"):
            assert not replay()
    assert not replay()
    with torch.no_grad():
        assert replay()


def test_an_input_in_other_memory(quantize):
    x, z, calls = quantize
    replay = Replay(calls, z, [x])
    assert replay()
    x.data = torch.ones(4, 64)
    assert not replay()


def test_an_operator_whose_result_changes_its_shape():
    x, y = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([[1], [2]])
    replay = Replay([OperatorCall(torch.nonzero, (x,), {}, [y])], None)
    x[0] = 3
    assert not replay() and y.tolist() == [[1], [2]]
    x[2] = 0
    assert replay() and y.tolist() == [[0], [1]]


def test_an_operator_that_changes_its_argument():
    x = torch.ones(3)
    replay = Replay([OperatorCall(torch.ops.aten.mul_.Tensor, (x, 2.0), {}, [x])], None)
    assert replay() and replay() and x.tolist() == [4.0] * 3


def test_a_kernel_that_computes_nothing_stops_the_replay():
    """Attention leaves codes that are no numbers to the operator."""
    query, out = torch.randn(1, 2, 1, 64), torch.zeros(1, 2, 1, 64)
    cache = [
        t
        for _ in range(2)
        for t in reversed(ops.quantize_mx(torch.randn(1, 2, 8, 64), "fp8_e4m3", 32, -1, "floor", "even"))
    ]
    of_one_slot = [(*one.shape[:2], 1, one.shape[3]) for one in cache]
    attention = PreparedAttention((1, 2, 1, 64), *of_one_slot, None, query.dtype, "fp8_e4m3", 32, 64, None)
    x, y = torch.ones(64), torch.zeros(64)
    after = call_of(PreparedActivation((64,), x.dtype, x.dtype, *OPTIONS), x, out=y)
    replay = Replay([call_of(attention, query, *cache, out=out), after], (query, cache, out, x, y))
    assert replay() and y.tolist() == [1.0] * 64
    cache[0][0, 0, 0, 0] = 0x7F
    y.zero_()
    assert not replay() and not y.any()
