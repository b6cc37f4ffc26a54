"""What has a form of its own for Inductor's Triton, compiled for the CPU; `test_cuda` tells what a GPU makes of it."""

import pytest
import torch

from pt2mx.kernels import inductor_gpu

#: blocks, their axis, and the dimensions of the values from the outermost in memory to the innermost
BLOCKS = {
    "channels first": (torch.randn(2, 3, 4, 5, 6), 1, [0, 1, 2, 3]),
    "channels last": (torch.randn(2, 5, 6, 3, 4).permute(0, 3, 4, 1, 2), 1, [0, 2, 3, 1]),
    "keys": (torch.randn(2, 3, 4, 5, 6).permute(0, 3, 1, 2, 4), 2, [0, 2, 1, 3]),
    "first": (torch.randn(3, 4, 5), 0, [0, 1]),
}


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_joined_in_their_order_in_memory(name, dynamic):
    blocks, axis, order = BLOCKS[name]
    want = blocks.relu().flatten(axis, axis + 1) * 2
    compiled = torch.compile(lambda x: torch.ops.pt2mx.join_blocks(x.relu(), axis, order) * 2, dynamic=dynamic)
    for got in (inductor_gpu.flatten(blocks.relu(), axis) * 2, compiled(blocks)):
        assert torch.equal(got, want)
        assert got.permute(order).is_contiguous()
