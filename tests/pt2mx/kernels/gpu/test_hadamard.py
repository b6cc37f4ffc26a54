"""On an NVIDIA GPU rotation equals its definition on the CPU to the bit: alone, before quantization, in a matmul."""

import pytest
import torch

from pt2mx import MXSpec, quantize_mx
from pt2mx.kernels import hadamard
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, to_mma_layout
from pt2mx.ops import fake_quantize_mx
from pt2mx.ops.hadamard import rotated_fake_quantize_mx
from pt2mx.ops.linear import linear_mx_mma_layout
from tests.compare import relative_error, same

pytestmark = pytest.mark.cuda

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 5, 128), 2), ((1, 16384), 1), ((64, 3), 0), ((2, 256, 70), 1), ((4096, 320), 1), ((32,), 0), ((0, 32), 1)],
)
def test_sizes(shape, axis, dtype):
    x = (torch.randn(shape) * torch.randn(shape).exp2()).to(dtype)
    for size in (1, 2, 32, 256, 4096, 8192):
        if shape[axis] % size == 0:
            got = torch.ops.pt2mx.hadamard(x.cuda(), size, axis)
            assert same(got, hadamard.rotate(x, size, axis)) and got.is_contiguous()


@pytest.mark.parametrize("size", [2, 4, 32])
def test_signs_of_zeros(size):
    x = torch.where(torch.rand(64, 32) < 0.5, 0.0, -0.0)
    x[32:, ::3] = torch.randn(32, 11)
    assert same(torch.ops.pt2mx.hadamard(x.cuda(), size, -1), hadamard.rotate(x, size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 96), (1, 2048), (40, 4128), (700, 96)])
def test_rotated_and_quantized(shape, dtype):
    x = torch.randn(shape).to(dtype)
    for size in (1, 8, 32, 2048):
        if shape[-1] % size:
            continue
        for element in ("fp4_e2m1", "fp8_e4m3", "int8"):
            for block in (16, 32, 48):
                want = fake_quantize_mx(
                    torch.ops.pt2mx.hadamard(x, size, -1), element, block, -1, "even", "even", None, "identity"
                )
                assert same(rotated_fake_quantize_mx(x.cuda(), size, element, block, "even", "even"), want)


@pytest.mark.parametrize("name", FRAGMENTS)
@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (1000, 1376), (96, 256), (64, 32)])
def test_times_the_identity_a_product_gives_the_rotated_row(name, n, k):
    scale, data = quantize_mx(torch.eye(n, k), name)
    weight = to_mma_layout(data.cuda(), scale.cuda(), MXSpec(name))
    x = torch.randn(1, k).bfloat16()
    want = torch.zeros(1, n, dtype=torch.bfloat16)
    want[:, : min(n, k)] = hadamard.rotate(x, 32)[:, :n]
    assert torch.equal(linear_mx_mma_layout(x.cuda(), *weight, None, name, n, 32).cpu(), want)


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e3m2", "fp6_e2m3", "fp8_e4m3"])
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (1000, 1376), (96, 256), (20000, 2048)])
def test_product_of_a_rotated_x(name, n, k):
    scale, data = quantize_mx(torch.randn(n, k), name)
    weight = to_mma_layout(data.cuda(), scale.cuda(), MXSpec(name))
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 2, 9, 40):
        for rotation in (16, 32):
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            got = linear_mx_mma_layout(x, *weight, bias, name, n, rotation)
            want = linear_mx_mma_layout(torch.ops.pt2mx.hadamard(x, rotation, -1), *weight, bias, name, n, 0)
            assert relative_error(got, want) < 1e-3
            assert torch.equal(got, linear_mx_mma_layout(x, *weight, bias, name, n, rotation))


def test_a_graph_waits_for_what_wrote_x():
    scale, data = quantize_mx(torch.randn(2048, 2048) / 45, "mxfp4")
    weight = to_mma_layout(data.cuda(), scale.cuda(), MXSpec("fp4_e2m1"))
    x = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)

    def chain(x, each):
        for _ in range(30):
            x = linear_mx_mma_layout(torch.ops.pt2mx.hadamard(x + 0.5, 32, -1), *weight, None, "fp4_e2m1", 2048, 32)
            each()
        return x

    want = chain(x, torch.cuda.synchronize)
    assert want.isfinite().all() and want.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x, lambda: None)
    for _ in range(5):
        graph.replay()
        assert torch.equal(got, want)
