import pytest
import torch
from torch.library import opcheck

from pt2mx import FORMATS, MXError
from pt2mx.kernels.hadamard import rotate_back
from pt2mx.modes import ROUNDINGS, SCALE_MODES
from pt2mx.ops import fake_quantize_mx
from pt2mx.ops.hadamard import hadamard
from pt2mx.ops.rotated_quantization import rotated_fake_quantize_mx
from tests.compare import same
from tests.cpu_kernels import DTYPES
from tests.random_values import random_values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 96), (1, 2048), (300, 96), (7, 4160), (64,), (0, 32)])
def test_is_one_after_the_other(shape, dtype):
    x = random_values(shape, dtype, 2)
    for i, element in enumerate(FORMATS):
        for size, block in ((1, 32), (32, 32), (32, 16), (4, 48), (32, 10**6)):
            mode = list(SCALE_MODES)[i % len(SCALE_MODES)]
            got = rotated_fake_quantize_mx(x, size, element, block, mode)
            assert same(got, fake_quantize_mx(hadamard(x, size), element, block, -1, mode)) and got.is_contiguous()


@pytest.mark.parametrize("rounding", [r for r in ROUNDINGS if not ROUNDINGS[r].random])
def test_every_rounding(rounding):
    x = torch.randn(6, 64).T.contiguous().T
    want = fake_quantize_mx(hadamard(x, 16), "fp6_e2m3", 32, -1, "floor", rounding)
    assert same(rotated_fake_quantize_mx(x, 16, "fp6_e2m3", 32, "floor", rounding), want)


def test_threads_do_not_change_bits():
    x, threads, results = torch.randn(900, 320), torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(rotated_fake_quantize_mx(x, 32, "fp4_e2m1", 32))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_opcheck_and_gradient():
    x = torch.randn(2, 64, requires_grad=True)
    opcheck(rotated_fake_quantize_mx, (x, 32, "fp4_e2m1", 32))
    grad = torch.randn(2, 64)
    rotated_fake_quantize_mx(x, 32, "fp4_e2m1", 32).backward(grad)
    assert torch.equal(x.grad, rotate_back(grad, 32))


def test_compiled_it_has_the_same_bits(compiler):
    x = torch.randn(5, 96)
    compiled = torch.compile(lambda x: rotated_fake_quantize_mx(x * 2, 32, "fp4_e2m1", 32) + 1, fullgraph=True)
    assert torch.equal(compiled(x), rotated_fake_quantize_mx(x * 2, 32, "fp4_e2m1", 32) + 1)


@pytest.mark.parametrize(
    ("x", "size", "arguments", "message"),
    [
        (torch.ones(4, 48), 32, ("fp4_e2m1", 32), "blocks of 32 do not rotate 48 values"),
        (torch.ones(4, 64).double(), 32, ("fp4_e2m1", 32), "float32, float16 or bfloat16"),
        (torch.ones(4, 64), 32, ("fp5", 32), "fp5"),
        (torch.ones(4, 64), 32, ("fp4_e2m1", 32, "floor", "stochastic"), "not rounded 'stochastic' at once"),
    ],
)
def test_bad_input(x, size, arguments, message):
    with pytest.raises(MXError, match=message):
        rotated_fake_quantize_mx(x, size, *arguments)
