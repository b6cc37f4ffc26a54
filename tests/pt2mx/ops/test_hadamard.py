import pytest
import torch
from torch.library import opcheck

from pt2mx import FORMATS, MXError
from pt2mx.kernels.hadamard import rotate, rotate_back
from pt2mx.modes import ROUNDINGS
from pt2mx.ops import fake_quantize_mx
from pt2mx.ops.hadamard import hadamard, rotated_fake_quantize_mx
from tests.compare import same
from tests.cpu_kernels import DTYPES
from tests.oracle import modes_of
from tests.random_values import random_values
from tests.threads import on_threads

HALF = (torch.bfloat16, torch.float16)


def matrix(size):
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    negative = [bin(i & i >> 1 & 0b010101).count("1") % 2 for i in range(size)]
    return (1 - 2 * torch.tensor(negative).double()).unsqueeze(1) * h / size**0.5


@pytest.mark.parametrize("size", [1, 2, 16, 32, 64])
def test_is_the_product_with_the_matrix(size):
    x = torch.randn(3, 5, 128)
    want = (x.double().unflatten(-1, (-1, size)) @ matrix(size)).flatten(-2)
    torch.testing.assert_close(hadamard(x, size, -1).double(), want, rtol=1e-6, atol=1e-6)
    moved = hadamard(x.permute(2, 0, 1), size, 0)
    assert moved.is_contiguous() and torch.equal(moved, hadamard(x, size, -1).permute(2, 0, 1))


@pytest.mark.compiled
@pytest.mark.slow_except("dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_opcheck(dtype):
    """Of few stages: each is some operators for which symbolic sizes are traced."""
    opcheck(hadamard, (torch.randn(2, 8, dtype=dtype, requires_grad=True), 4, -1))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_gradient(dtype):
    x = torch.randn(2, 64, dtype=dtype, requires_grad=True)
    y = hadamard(x, 32, -1)
    grad = torch.randn_like(y)
    y.backward(grad)
    want = (grad.double().unflatten(-1, (-1, 32)) @ matrix(32).T).flatten(-2)
    assert y.dtype == dtype and x.grad.dtype == dtype
    torch.testing.assert_close(x.grad.double(), want, rtol=1e-2, atol=1e-2)


def test_a_product_of_rotated_factors_is_the_product():
    x, w = torch.randn(6, 96), torch.randn(7, 96)
    torch.testing.assert_close(hadamard(x, 32, -1) @ hadamard(w, 32, -1).T, x @ w.T, rtol=1e-4, atol=1e-4)


def test_empty():
    assert hadamard(torch.ones(0, 64), 32, -1).shape == (0, 64) and hadamard(torch.ones(3, 0), 32, -1).shape == (3, 0)


def test_an_outlier_is_shared_out():
    x = torch.zeros(64)
    x[5] = 32.0
    assert hadamard(x, 32, -1).abs().max() == pytest.approx(32 / 32**0.5) and not hadamard(x, 32, -1)[32:].any()


@pytest.mark.parametrize(("size", "largest"), [(4, 1), (16, 1), (64, 1), (8, 2**0.5), (32, 2**0.5)])
def test_a_mean_stays_small(size, largest):
    assert hadamard(torch.ones(size), size, -1).abs().max() == pytest.approx(largest)


@pytest.mark.compiled
def test_written_out_and_compiled_it_has_the_same_bits(compiler):
    x = torch.randn(4, 96, 3)
    want = hadamard(x, 32, 1)
    assert torch.equal(rotate(x, 32, 1), want)
    assert torch.equal(torch.compile(rotate)(x, 32, 1), want)
    assert torch.equal(torch.compile(lambda x: hadamard(x, 32, 1) * 2, fullgraph=True)(x), want * 2)


@pytest.mark.parametrize(
    ("x", "size", "axis", "message"),
    [
        (torch.ones(4, 48), 32, -1, "blocks of 32 do not rotate 48 values"),
        (torch.ones(4, 48), 24, -1, "a power of two that divides"),
        (torch.ones(4, 48), 0, -1, "blocks of 0 do not rotate"),
        (torch.ones(4, 48), 4, 2, "axis=2 is out of range"),
        (torch.ones(4, 48).double(), 4, -1, "float32, float16 or bfloat16, not torch.float64"),
        (torch.ones(4, 48).int(), 4, -1, "not torch.int32"),
    ],
)
def test_bad_input(x, size, axis, message):
    with pytest.raises(MXError, match=message):
        hadamard(x, size, axis)


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 96), (1, 2048), (300, 96), (7, 4160), (64,), (0, 32)])
def test_quantized_is_one_after_the_other(shape, dtype):
    x = random_values(shape, dtype, 2)
    for i, element in enumerate(FORMATS):
        for size, block in ((1, 32), (32, 32), (32, 16), (4, 48), (32, 10**6)):
            mode = (*modes_of(element),)[i % len(modes_of(element))]
            got = rotated_fake_quantize_mx(x, size, element, block, mode, "even")
            assert (
                same(got, fake_quantize_mx(hadamard(x, size, -1), element, block, -1, mode, "even", None, "identity"))
                and got.is_contiguous()
            )


@pytest.mark.parametrize("rounding", [r for r in ROUNDINGS if not ROUNDINGS[r].random])
def test_quantized_every_rounding(rounding):
    x = torch.randn(6, 64).T.contiguous().T
    want = fake_quantize_mx(hadamard(x, 16, -1), "fp6_e2m3", 32, -1, "floor", rounding, None, "identity")
    assert same(rotated_fake_quantize_mx(x, 16, "fp6_e2m3", 32, "floor", rounding), want)


def test_quantized_threads_do_not_change_bits():
    x = torch.randn(900, 320)
    assert torch.equal(*on_threads(lambda: rotated_fake_quantize_mx(x, 32, "fp4_e2m1", 32, "floor", "even"), 1, 2))


@pytest.mark.compiled
def test_quantized_opcheck_and_gradient():
    x = torch.randn(2, 64, requires_grad=True)
    opcheck(rotated_fake_quantize_mx, (x, 4, "fp4_e2m1", 32, "floor", "even"))
    grad = torch.randn(2, 64)
    rotated_fake_quantize_mx(x, 32, "fp4_e2m1", 32, "floor", "even").backward(grad)
    assert torch.equal(x.grad, rotate_back(grad, 32))


@pytest.mark.compiled
def test_quantized_compiled_it_has_the_same_bits(compiler):
    x = torch.randn(5, 96)
    compiled = torch.compile(
        lambda x: rotated_fake_quantize_mx(x * 2, 32, "fp4_e2m1", 32, "floor", "even") + 1, fullgraph=True
    )
    assert torch.equal(compiled(x), rotated_fake_quantize_mx(x * 2, 32, "fp4_e2m1", 32, "floor", "even") + 1)


@pytest.mark.parametrize(
    ("x", "size", "arguments", "message"),
    [
        (torch.ones(4, 48), 32, ("fp4_e2m1", 32, "floor", "even"), "blocks of 32 do not rotate 48 values"),
        (torch.ones(4, 64).double(), 32, ("fp4_e2m1", 32, "floor", "even"), "float32, float16 or bfloat16"),
        (torch.ones(4, 64), 32, ("fp5", 32, "floor", "even"), "fp5"),
        (torch.ones(4, 64), 32, ("fp4_e2m1", 32, "floor", "stochastic"), "not rounded 'stochastic' at once"),
    ],
)
def test_quantized_bad_input(x, size, arguments, message):
    with pytest.raises(MXError, match=message):
        rotated_fake_quantize_mx(x, size, *arguments)
