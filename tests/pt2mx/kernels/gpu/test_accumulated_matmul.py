"""The Triton kernel of accumulated matmuls gives the bits of the definition, and a Hopper GPU those of `hopper`."""

import pytest
import torch

import pt2mx
from pt2mx.kernels.accumulated_matmul import matmul
from tests.pt2mx.kernels.cpu.test_accumulated_matmul import ACCUMULATORS, SHAPES, VALUES

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_bits(accumulator, values, dtype):
    generator = torch.Generator().manual_seed(3)
    for shapes in SHAPES:
        x, other = (VALUES[values](torch.randn(shape, generator=generator), generator).to(dtype) for shape in shapes)
        actual = torch.ops.pt2mx.matmul_accumulated(x.cuda(), other.cuda(), None, accumulator).cpu()
        expected = matmul(x, other, pt2mx.parse_accumulator(accumulator)).to(dtype)
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_any_strides():
    x, other = torch.randn(70, 6, 20).permute(1, 2, 0), torch.randn(9, 70).mT
    actual = torch.ops.pt2mx.matmul_accumulated(x.cuda(), other.cuda(), None, "hopper")
    assert actual.is_contiguous() and torch.equal(actual.cpu(), matmul(x, other, pt2mx.parse_accumulator("hopper")))


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="not a Hopper")
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_tensor_cores_of_a_hopper_give_the_same_bits(dtype, fast):
    generator, one = torch.Generator().manual_seed(4), torch.ones((), device="cuda")
    x, other = (torch.randn(512, 2048, generator=generator).cuda().to(d) for d in (dtype, torch.float8_e4m3fn))
    hardware = torch._scaled_mm(x, other.mT, one, one, out_dtype=torch.float32, use_fast_accum=fast)
    text = "hopper{32,row}" if fast else "hopper{32,128}"
    equal = torch.ops.pt2mx.matmul_accumulated(x.float(), other.float().mT, None, text) == hardware
    assert equal.float().mean() >= 0.9999
