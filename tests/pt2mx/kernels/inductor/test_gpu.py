"""Functions with their own form for Inductor's Triton: compiled for the CPU, and their code on a GPU."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from pt2mx import fake_quantize_mx
from pt2mx.kernels.inductor import gpu as inductor_gpu
from tests.compare import relative_error, same
from tests.operators import outputs_of_a_package

pytestmark = pytest.mark.usefixtures("compiler")

#: blocks and their axis
BLOCKS = {
    "channels first": (torch.randn(2, 3, 4, 5, 6), 1),
    "channels last": (torch.randn(2, 5, 6, 3, 4).permute(0, 3, 4, 1, 2), 1),
    "keys": (torch.randn(2, 3, 4, 5, 6).permute(0, 3, 1, 2, 4), 2),
    "first": (torch.randn(3, 4, 5), 0),
}


@pytest.mark.compiled
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_joined_in_memory_of_their_own(name, dynamic):
    blocks, axis = BLOCKS[name]
    want = blocks.relu().flatten(axis, axis + 1) * 2
    compiled = torch.compile(lambda x: torch.ops.pt2mx.join_blocks(x.relu(), axis) * 2, dynamic=dynamic)
    for got in (inductor_gpu.from_blocks(blocks.relu(), axis, want.shape[axis]) * 2, compiled(blocks)):
        assert torch.equal(got, want)
        assert got.is_contiguous()


@pytest.mark.cuda
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp4_e2m1"])
def test_compiled_along_every_axis(name, dynamic):
    for axis in range(4):
        for order in ((0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 1, 3), (3, 2, 1, 0)):
            torch._dynamo.reset()
            x = torch.randn(6, 70, 33, 40, dtype=torch.bfloat16).permute(order)

            def run(x, axis=axis):
                return fake_quantize_mx(x.relu(), name, axis=axis) * 2

            got = torch.compile(run, fullgraph=True, dynamic=dynamic)(x.cuda())
            assert same(got, run(x))


@pytest.mark.cuda
@pytest.mark.parametrize("example", [2, 64])
def test_packages_take_other_lengths_than_the_example(example, tmp_path):
    outputs = outputs_of_a_package("fp8_e4m3", "cuda", example, tmp_path / "operators.pt2")
    for i, (got, want) in enumerate(outputs):
        is_scale = i % 4 == 1
        if is_scale and example <= 32:
            continue  # an output's size that is 1 in the example is 1 to Inductor always
        assert torch.equal(got.cpu(), want)


@pytest.mark.cuda
def test_convolutions_find_their_input_quantized_by_the_kernel_before():
    """In the order in memory that they want: as many kernels as without quantization, and none that only copies."""

    def run(x, first, second, quantize):
        y = torch.relu(torch.nn.functional.conv2d(x, first, padding=1))
        y = fake_quantize_mx(y, "fp8_e4m3", axis=1) if quantize else y
        return torch.nn.functional.conv2d(y, second, padding=1)

    torch._dynamo.reset()
    shapes = ((8, 64, 56, 56), (64, 64, 3, 3), (64, 64, 3, 3))
    x, *weights = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    kernels = []
    with torch.no_grad():
        for quantize in (False, True):
            compiled = torch.compile(lambda *tensors, q=quantize: run(*tensors, q), fullgraph=True)
            got, (code,) = run_and_get_code(compiled, x, *weights)
            want = run(x, *weights, quantize)
            assert relative_error(got, want) < 0.01
            kernels.append(code.count(".run("))
    # torch 2.13's scheduler computes the scales in a kernel of their own
    assert kernels[1] <= kernels[0] + (torch.__version__ >= "2.13")
