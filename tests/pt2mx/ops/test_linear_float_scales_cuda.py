"""Matmuls with weights whose scales have a significand on a GPU, against a float64 product of the same operands."""

import pytest
import torch

from pt2mx import ELEMENTS, MXSpec
from pt2mx.kernels import float_scales, reference
from pt2mx.kernels.gpu.mma_layout import from_mma_layout, to_mma_layout
from pt2mx.ops.linear import linear_mx_mma_layout
from tests.compare import same
from tests.kernel_calls import ByArguments

pytestmark = pytest.mark.cuda

BATCHES = (0, 1, 2, 8, 9, 16, 17, 33, 64, 130, 300, 600, 1024, 1600, 4096)
FORMATS = [("fp4_e2m1", "e4m3_f32"), ("fp4_e2m1", "e5m3"), ("fp6_e2m3", "e4m3"), ("fp8_e4m3", "e4m3_f32")]


def packed(name, scale_format, n, k, block_size=16):
    """Spec, codes, scales and tensor scale of a random weight, on the CPU."""
    spec = MXSpec(name, block_size, 1, scale_format=scale_format)
    w = torch.randn(n, k) * torch.randn(n, 1).exp() / 64
    w[0] = 0
    t = float_scales.tensor_scale(w, spec) if spec.scale_format.tensor else None
    scale, data = reference.quantize(w, spec, tensor_scale=t)
    return spec, data, scale, t


def in_mma_layout(spec, data, scale, t):
    parts = to_mma_layout(data.cuda(), scale.cuda(), spec)
    return parts, None if t is None else t.cuda()


def check(got, x, spec, data, scale, t, bias=None, times=1.5):
    """No worse than `times` what rounding the exact result to the dtype gives."""
    weight = reference.dequantize(data, scale, spec, torch.float32, x.shape[-1], tensor_scale=t).double().cuda()
    want = x.double() @ weight.T + (0 if bias is None else bias.double())
    least = (want.to(got.dtype).double() - want).norm()
    assert (got.double() - want).norm() <= times * least + 5e-6 * want.norm()


@pytest.mark.parametrize("shape", [(256, 512), (33, 200), (1000, 1384), (16, 8), (2048, 4096)])
@pytest.mark.parametrize(("name", "scale_format"), FORMATS)
def test_mma_layout(name, scale_format, shape):
    weight = packed(name, scale_format, *shape)
    parts, t = in_mma_layout(*weight)
    bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
    for batch in BATCHES:
        x = torch.randn(batch, shape[1], device="cuda", dtype=torch.bfloat16)
        for added in (None, bias):
            got = linear_mx_mma_layout(x, *parts, added, name, shape[0], 0, t)
            # many rows multiply a weight that is rounded to bfloat16
            check(got, x, *weight, added, 1.5 if batch < 1536 else 2.5)


def test_block_of_32_and_rotation():
    weight = packed("fp4_e2m1", "e4m3_f32", 512, 1024, 32)
    parts, t = in_mma_layout(*weight)
    for batch in (1, 5, 100):
        x = torch.randn(batch, 1024, device="cuda", dtype=torch.bfloat16)
        rotated = torch.ops.pt2mx.hadamard(x, 32, -1)
        check(linear_mx_mma_layout(x, *parts, None, "fp4_e2m1", 512, 32, t), rotated, *weight)


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
def test_every_tile_of_the_gemm_kernel(rows, warps, monkeypatch):
    from pt2mx.kernels.gpu import linear, tuning

    monkeypatch.setattr(tuning, "kernel_of", lambda *_: "gemm")
    for (n, k), split_k in (((1000, 1384), 1), ((300, 4160), 3)):
        monkeypatch.setattr(tuning, "gemm_tile", lambda *_, split_k=split_k: tuning.GemmTile(rows, warps, split_k))
        weight = packed("fp4_e2m1", "e4m3_f32", n, k)
        parts, t = in_mma_layout(*weight)
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        for batch in (rows - 3, 2 * rows):
            x = torch.randn(batch, k, device="cuda", dtype=torch.bfloat16)
            got = [ByArguments(linear).linear_mma_layout(x, *parts, bias, weight[0].element, n, 0, t) for _ in range(3)]
            check(got[0], x, *weight, bias)
            assert all(torch.equal(out, got[0]) for out in got)


@pytest.mark.parametrize("scale_format", ["e4m3", "e4m3_f32"])
@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2"])
def test_the_dequantized_weight_is_that_of_the_definition(name, scale_format):
    """Every finite scale, subnormal ones too, with random codes."""
    from pt2mx.kernels.gpu import linear as gpu_linear

    element, spec = ELEMENTS[name], MXSpec(name, 16, 1, scale_format=scale_format)
    _, data, _, _ = packed(name, scale_format, 127, 512)
    scale = torch.arange(127, dtype=torch.uint8).unsqueeze(1).repeat(1, 32)
    parts = to_mma_layout(data, scale, spec)
    t = torch.tensor(0.0078125) if spec.has_tensor_scale else None
    got = gpu_linear.dequantize(*(p.cuda() for p in parts), element, 127, 512, None if t is None else t.cuda())
    assert same(got, from_mma_layout(*parts, element, 127, 512, t))
    assert same(got, reference.dequantize(data, scale, spec, torch.bfloat16, 512, tensor_scale=t))


@pytest.mark.parametrize("scale_format", ["e4m3", "e4m3_f32", "e4m3_f32_divisor"])
def test_float32_results_of_bfloat16_values(scale_format):
    from pt2mx.kernels.gpu import bf16_matmul

    gpu = ByArguments(bf16_matmul)
    spec, data, scale, t = weight = packed("fp4_e2m1", scale_format, 130, 256)
    args = data.cuda(), scale.cuda()
    more = None if t is None else t.cuda()
    x = torch.randn(70, 256, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(130, device="cuda")
    for added in (None, bias):
        got = gpu.linear(x, *args, added, spec, 0, torch.float32, more)
        assert got.dtype == torch.float32
        check(got, x, *weight, added)
    offs = torch.tensor([30, 70], dtype=torch.int32, device="cuda")
    experts = (torch.stack([a, a]) for a in args)
    got = gpu.grouped_linear(x, *experts, offs, spec.replace(axis=2), torch.float32, more)
    check(got, x, *weight)
    assert gpu.linear(x, *args, None, spec.replace(scale_format="bf16"), 0, torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_format", ["e4m3_f32", "e4m3_f32_divisor"])
def test_a_tensor_scale_of_each_expert(scale_format, dtype):
    """Results in float32 multiply bfloat16 codes and scale the rows of each expert; others dequantize each expert."""
    _, data, scale, t = packed("fp4_e2m1", scale_format, 130, 256)
    experts = torch.stack([data, data.flip(0), data]).cuda(), torch.stack([scale, scale.flip(0), scale]).cuda()
    scales = (t * torch.tensor([1.0, 3.0, 0.1])).cuda()
    x = torch.randn(70, 256, device="cuda", dtype=torch.bfloat16)
    offs = torch.tensor([30, 30, 70], dtype=torch.int32, device="cuda")
    last = scale_format, None, scales
    got = torch.ops.pt2mx.grouped_linear_mx(x, *experts, offs, "fp4_e2m1", 16, dtype, *last)
    dense = torch.ops.pt2mx.dequantize_mx(*experts, "fp4_e2m1", 16, torch.float32, -1, None, *last)
    for expert in range(3):
        one = torch.ops.pt2mx.dequantize_mx(experts[0][expert], experts[1][expert], "fp4_e2m1", 16, torch.float32, -1,
                                            None, *last[:2], scales[expert])  # fmt: skip
        assert torch.equal(dense[expert], one)
    want = torch.cat([x[:30].double() @ dense[0].double().T, x[30:].double() @ dense[2].double().T])
    assert (got.double() - want).norm() < want.norm() * (1e-6 if dtype == torch.float32 else 1e-2)


def test_cuda_graph():
    weight = packed("fp4_e2m1", "e4m3_f32", 96, 256)
    parts, t = in_mma_layout(*weight)
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    want = linear_mx_mma_layout(x, *parts, None, "fp4_e2m1", 96, 0, t)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = linear_mx_mma_layout(x, *parts, None, "fp4_e2m1", 96, 0, t)
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)
