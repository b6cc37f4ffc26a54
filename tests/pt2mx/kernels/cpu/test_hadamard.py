"""The C++ rotation against its definition, to the bit."""

import pytest
import torch

from pt2mx import MXSpec
from pt2mx.kernels import hadamard, reference
from pt2mx.kernels.cpu import hadamard as cpu
from pt2mx.kernels.cpu import quantize
from tests.cpu_kernels import DTYPES, assert_same
from tests.kernel_calls import ByArguments
from tests.random_values import random_values
from tests.threads import on_threads

SHAPES = [
    ((3, 5, 128), 2), ((7, 96), 1), ((1, 8192), 1), ((64, 3), 0), ((2, 256, 70), 1), ((1024, 9), 0), ((32,), 0),
    ((11, 5), 1), ((2, 3, 12), 2), ((3, 16384), 1), ((0, 64), 1), ((4, 0), 1),
]  # fmt: skip


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_every_size(shape, axis, dtype):
    x = random_values(shape, dtype, 2)
    size = 1
    while shape[axis] % size == 0 and size <= max(shape[axis], 4):
        for each in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
            assert_same(cpu.rotate(each, size, axis), hadamard.rotate(each, size, axis), (shape, axis, size))
        size *= 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", range(5))
def test_every_kind_of_value(kind, dtype):
    x = random_values((40, 160), dtype, kind)
    for axis in (0, 1):
        assert_same(cpu.rotate(x, 8, axis), hadamard.rotate(x, 8, axis), (kind, axis))
    x[0, 3], x[1, 40], x[2, 159] = torch.inf, -torch.inf, torch.nan
    assert_same(cpu.rotate(x, 32), hadamard.rotate(x, 32), kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_and_quantized(dtype):
    x, spec = torch.randn(6, 256).to(dtype), MXSpec("fp4_e2m1", 32, 1)
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        want = reference.fake_quantize(hadamard.rotate(x, size), spec)
        assert_same(ByArguments(quantize).rotated_fake_quantize(x, size, spec), want, size)


@pytest.mark.parametrize("axis", [0, 1])
def test_threads_do_not_change_bits(axis):
    x = torch.randn(512, 640)
    assert torch.equal(*on_threads(lambda: cpu.rotate(x, 32, axis), 1, 2))


@pytest.mark.slow
def test_other_processors(on_other_processors):
    on_other_processors(__file__, "every_size or rotated")
