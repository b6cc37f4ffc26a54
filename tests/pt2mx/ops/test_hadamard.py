import pytest
import torch
from torch.library import opcheck

from pt2mx import MXError
from pt2mx.kernels.hadamard import rotate
from pt2mx.ops.hadamard import hadamard


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
    torch.testing.assert_close(hadamard(x, size).double(), want, rtol=1e-6, atol=1e-6)
    moved = hadamard(x.permute(2, 0, 1), size, 0)
    assert moved.is_contiguous() and torch.equal(moved, hadamard(x, size).permute(2, 0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck_and_gradient(dtype):
    x = torch.randn(2, 64, dtype=dtype, requires_grad=True)
    opcheck(hadamard, (x, 32))
    y = hadamard(x, 32)
    grad = torch.randn_like(y)
    y.backward(grad)
    want = (grad.double().unflatten(-1, (-1, 32)) @ matrix(32).T).flatten(-2)
    assert y.dtype == dtype and x.grad.dtype == dtype
    torch.testing.assert_close(x.grad.double(), want, rtol=1e-2, atol=1e-2)


def test_a_product_of_rotated_factors_is_the_product():
    x, w = torch.randn(6, 96), torch.randn(7, 96)
    torch.testing.assert_close(hadamard(x, 32) @ hadamard(w, 32).T, x @ w.T, rtol=1e-4, atol=1e-4)


def test_empty():
    assert hadamard(torch.ones(0, 64), 32).shape == (0, 64) and hadamard(torch.ones(3, 0), 32).shape == (3, 0)


def test_an_outlier_is_shared_out():
    x = torch.zeros(64)
    x[5] = 32.0
    assert hadamard(x, 32).abs().max() == pytest.approx(32 / 32**0.5) and not hadamard(x, 32)[32:].any()


@pytest.mark.parametrize(("size", "largest"), [(4, 1), (16, 1), (64, 1), (8, 2**0.5), (32, 2**0.5)])
def test_a_mean_stays_small(size, largest):
    assert hadamard(torch.ones(size), size).abs().max() == pytest.approx(largest)


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
