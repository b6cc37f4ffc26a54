"""`rotate_and_store` and `rotate_quantize_and_store` on a GPU, to the bit of their definitions."""

import pytest
import torch

from pt2mx.ops.rope import RotateAndStore, RotateQuantizeAndStore, rotate_and_store, rotate_quantize_and_store
from tests.compare import same
from tests.pt2mx.ops.test_rope import operands
from tests.pt2mx.ops.test_rotate_quantize_and_store import FORMATS, of_codes

pytestmark = pytest.mark.cuda

SIZES = [
    {"width": 64, "value_width": 64},
    {"heads": 32, "key_heads": 8, "width": 128, "value_width": 64, "slots": 600},
    {"heads": 3, "key_heads": 3, "length": 4, "width": 32, "value_width": 256},
    {"width": 96, "value_width": 96},  # as the definition
]


@pytest.mark.parametrize("layout", ["contiguous", "slices of a matmul"])
@pytest.mark.parametrize("sizes", SIZES)
def test_values(sizes, layout):
    args = [arg.cuda() for arg in operands(**sizes)]
    if layout != "contiguous":
        args[:3] = [arg.transpose(1, 2).contiguous().transpose(1, 2) for arg in args[:3]]
    args[6] = args[6][:1]
    want = [arg.clone() for arg in args]
    args[1][0, 0], want[1][0, 0] = 0, 0
    y = RotateAndStore(*want).decompose()
    assert same(rotate_and_store(*args), y) and same(args[3], want[3]) and same(args[4], want[4])


def test_strided_slots():
    args = operands(width=64, value_width=64, length=2)
    want = [arg.clone() for arg in args]
    query = rotate_and_store(*want)
    args = [arg.cuda() for arg in args]
    args[5] = torch.stack([args[5], 0 * args[5]], 1)[:, 0]
    assert not args[5].is_contiguous() and all(map(same, [rotate_and_store(*args), *args[3:5]], [query, *want[3:5]]))


def test_a_slot_past_the_end_is_not_written():
    args = [arg.cuda() for arg in operands(width=64, value_width=64)]
    before = args[3].clone()
    args[5] = torch.tensor([6], device="cuda")
    rotate_and_store(*args)
    assert torch.equal(args[3], before)


def to_gpu(args):
    return [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]


@pytest.mark.parametrize("layout", ["contiguous", "slices of a matmul"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("text", FORMATS)
def test_values_of_codes(text, sizes, layout):
    on_cpu, want = of_codes(text, **sizes)
    args = to_gpu(on_cpu)
    if layout != "contiguous":
        args[:3] = [arg.transpose(1, 2).contiguous().transpose(1, 2) for arg in args[:3]]
    assert all(map(same, [rotate_quantize_and_store(*args), *args[3:7]], want))


@pytest.mark.parametrize("text", FORMATS)
def test_the_kernel_runs(text, monkeypatch):
    monkeypatch.setattr(RotateQuantizeAndStore, "decompose", None)
    args, want = of_codes(text, width=64, value_width=64)
    args = to_gpu(args)
    assert all(map(same, [rotate_quantize_and_store(*args), *args[3:7]], want))


def test_strided_slots_of_codes():
    args, want = of_codes("mxfp8", width=64, value_width=64, length=2)
    args = to_gpu(args)
    args[7] = torch.stack([args[7], 0 * args[7]], 1)[:, 0]
    assert not args[7].is_contiguous() and all(map(same, [rotate_quantize_and_store(*args), *args[3:7]], want))


def test_codes_past_the_end_are_not_written():
    args = to_gpu(of_codes("mxfp6_e2m3", width=64, value_width=64)[0])
    before = [tensor.clone() for tensor in args[3:7]]
    args[7] = torch.tensor([6], device="cuda")
    rotate_quantize_and_store(*args)
    assert all(map(torch.equal, args[3:7], before))


def test_in_a_graph():
    args = to_gpu(of_codes("mxfp8", width=128, value_width=128)[0])
    want = [tensor.clone() for tensor in args[3:7]]
    query = rotate_quantize_and_store(*args[:3], *want, *args[7:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            got = rotate_quantize_and_store(*args)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, query) and all(map(torch.equal, args[3:7], want))
