"""`rotate_and_store` on a GPU, to the bit of its definition."""

import pytest
import torch

from pt2mx.ops.rope import RotateAndStore, rotate_and_store
from tests.compare import same
from tests.pt2mx.ops.test_rope import operands

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
