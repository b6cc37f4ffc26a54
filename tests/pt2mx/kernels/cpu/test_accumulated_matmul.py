"""The C++ kernel of accumulated matmuls gives the bits of the definition."""

from functools import partial

import pytest
import torch

import pt2mx
from pt2mx.kernels.accumulated_matmul import matmul
from tests.threads import on_threads

ACCUMULATORS = (
    *("float32{32}", "float32{1}", "bfloat16", "bfloat16{1}", "bfloat16{32,128}", "float16{5,35}", "fixed(8,8)"),
    *("fixed(4,8){3}", "fixed(52,0)", "fixed(2,30){3}"),  # saturates at more bits than float32 has
    *("hopper", "hopper(14){32,row}", "hopper(23){7}", "hopper(1){row}"),
)
SHAPES = (
    *(((2, 20, 70), (70, 48)), ((3, 5, 33), (3, 33, 17)), ((1, 4, 3, 129), (2, 1, 129, 5)), ((4, 1), (1, 4))),
    *(((65, 140), (140, 1)), ((0, 4), (4, 3)), ((3, 0), (0, 3)), ((2, 4), (3, 4, 2))),
    ((2, 70, 40), (2, 40, 130)),  # several tiles of several batches on a GPU
)


def _of_11_bits(x, generator, least, most):
    """Values that a GPU cuts in a chain, if their exponents let it, and zeros of both signs."""
    exponents = torch.randint(least, most, x.shape, generator=generator)
    values = (x * 2**9).round().clamp(-(2**11) + 1, 2**11 - 1) * torch.exp2(exponents - 9)
    return torch.where(torch.rand(x.shape, generator=generator) < 0.2, -0.0, values)


#: name -> what changes normal values
VALUES = {
    "normal": lambda x, g: x,
    "subnormal products": lambda x, g: x * 1e-22,
    "products beyond float32": lambda x, g: x * 1e19,
    "exponents far apart": lambda x, g: x * torch.exp2(torch.randint(-60, 60, x.shape, generator=g)),
    "few bits": partial(_of_11_bits, least=-8, most=8),
    "few bits far apart": partial(_of_11_bits, least=-40, most=30),
    "mostly zeros": lambda x, g: x * (torch.rand(x.shape, generator=g) < 0.1),
    "inf": lambda x, g: torch.where(torch.rand(x.shape, generator=g) < 0.01, torch.inf, x),
    "nan": lambda x, g: torch.where(torch.rand(x.shape, generator=g) < 0.01, torch.nan, x),
}


@pytest.mark.diagonal
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_bits(accumulator, values):
    generator = torch.Generator().manual_seed(3)
    for shapes in SHAPES:
        x, other = (VALUES[values](torch.randn(shape, generator=generator), generator) for shape in shapes)
        actual = torch.ops.pt2mx.matmul_accumulated(x, other, None, accumulator)
        expected = matmul(x, other, pt2mx.parse_accumulator(accumulator))
        assert actual.shape == expected.shape and torch.equal(actual.isnan(), expected.isnan())
        bits = [t.nan_to_num(0.0, torch.inf, -torch.inf).view(torch.int32) for t in (actual, expected)]
        assert torch.equal(*bits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_of_any_strides(dtype):
    x, other = torch.randn(40, 6, 20).to(dtype).permute(1, 2, 0), torch.randn(9, 40).to(dtype).mT
    accumulator = pt2mx.parse_accumulator("hopper")
    actual = torch.ops.pt2mx.matmul_accumulated(x, other, None, str(accumulator))
    assert actual.is_contiguous() and torch.equal(actual, matmul(x, other, accumulator).to(dtype))


def test_threads_change_nothing():
    x, other = torch.randn(130, 64), torch.randn(64, 40)
    assert torch.equal(*on_threads(lambda: torch.ops.pt2mx.matmul_accumulated(x, other, None, "bfloat16"), 1, 2))
