"""Products with packed weights on a GPU, against a float64 product of the same operands."""

import pytest
import torch
from torch.nn import functional as F

from pt2mx import ELEMENTS, FORMATS, MXSpec, dequantize_mx, quantize_mx
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, from_mma_layout, to_mma_layout
from pt2mx.ops.linear import grouped_linear_mx, linear_mx, linear_mx_mma_layout

pytestmark = pytest.mark.cuda

BATCHES = (1, 2, 8, 9, 16, 17, 32, 33, 64, 130, 300, 600, 1024, 4096)


def packed(name, n, k, block_size=32):
    w = torch.randn(n, k) * torch.randn(n, 1).exp() / 64
    w[0] = 0
    scale, data = quantize_mx(w, name, block_size)
    return data.cuda(), scale.cuda()


def relative_error(got, x, weight, bias=None):
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    return ((got.double() - want).norm() / want.norm()).item()


def check(got, x, data, scale, bias, name, block_size=32):
    """No worse than 1.5 times what dequantizing first gives."""
    weight = dequantize_mx(data, scale, name, block_size, x.dtype, length=x.shape[-1])
    plain = relative_error(F.linear(x, weight, bias), x, weight, bias)
    assert relative_error(got, x, weight, bias) <= 1.5 * plain + 1e-9


@pytest.mark.parametrize("shape", [(256, 512), (33, 200), (1000, 1384), (16, 8), (2048, 4096)])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_mma_layout(name, shape):
    data, scale = packed(name, *shape)
    fragments = to_mma_layout(data, scale, MXSpec(name))
    bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
    for batch in BATCHES:
        x = torch.randn(batch, shape[1], device="cuda", dtype=torch.bfloat16)
        for added in (None, bias):
            got = linear_mx_mma_layout(x, *fragments, added, name, shape[0], 0)
            assert got.isfinite().all()
            check(got, x, data, scale, added, name)


@pytest.mark.parametrize("n", [13000, 25400])
@pytest.mark.parametrize("name", FORMATS)
def test_so_many_rows_that_few_warps_share_one(name, n):
    data, scale = packed(name, n, 1384)
    fragments = to_mma_layout(data, scale, MXSpec(name))
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    for batch in (1, 8, 13, 40, 1500, 1600):
        x = torch.randn(batch, 1384, device="cuda", dtype=torch.bfloat16)
        check(linear_mx_mma_layout(x, *fragments, bias, name, n, 0), x, data, scale, bias, name)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_the_dequantized_weight_is_that_of_the_reference(name):
    from pt2mx.kernels.gpu import linear as gpu_linear

    for n, k in ((48, 1384), (33, 8), (4096, 512)):
        data, scale = packed(name, n, k)
        fragments = to_mma_layout(data, scale, MXSpec(name))
        got = gpu_linear.dequantize(*fragments, ELEMENTS[name], n, k)
        want = from_mma_layout(*(f.cpu() for f in fragments), ELEMENTS[name], n, k)
        assert torch.equal(got.cpu().view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_every_tile_of_the_gemm_kernel(name, rows, warps, monkeypatch):
    from pt2mx.kernels.gpu import gemm, tuning

    for (n, k), split_k in (((1000, 1384), 1), ((300, 4160), 3)):
        monkeypatch.setattr(tuning, "gemm_tile", lambda *_, split_k=split_k: tuning.GemmTile(rows, warps, split_k))
        data, scale = packed(name, n, k)
        fragments = to_mma_layout(data, scale, MXSpec(name))
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        for batch in (rows - 3, 2 * rows):
            x = torch.randn(batch, k, device="cuda", dtype=torch.bfloat16)
            got = [torch.empty(batch, n, device="cuda", dtype=torch.bfloat16) for _ in range(5)]
            for out in got:
                gemm.gemm(x, *fragments, None, bias, out, ELEMENTS[name])
            check(got[0], x, data, scale, bias, name)
            assert all(torch.equal(out, got[0]) for out in got)


@pytest.mark.parametrize("name", FORMATS)
def test_without_instructions_of_sm_90(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    data, scale = packed(name, 1000, 1384)
    fragments = to_mma_layout(data, scale, MXSpec(name))
    for batch in (16, 17, 32, 33):
        x = torch.randn(batch, 1384, device="cuda", dtype=torch.bfloat16)
        check(linear_mx_mma_layout(x, *fragments, None, name, 1000, 0), x, data, scale, None, name)


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_plain_codes(name, dtype, block_size):
    for n, k in ((65, 77), (128, 256)):
        data, scale = packed(name, n, k, block_size)
        for batch in (1, 5, 64):
            x = torch.randn(batch, k, device="cuda").to(dtype)
            check(linear_mx(x, data, scale, None, name, block_size, 0), x, data, scale, None, name, block_size)


@pytest.mark.parametrize("name", FORMATS)
def test_ten_runs_give_the_same_bits(name):
    data, scale = packed(name, 512, 1024)
    fragments = to_mma_layout(data, scale, MXSpec(name))
    for batch in (1, 16, 20, 200):
        x = torch.randn(batch, 1024, device="cuda", dtype=torch.bfloat16)
        first = linear_mx_mma_layout(x, *fragments, None, name, 512, 0)
        for _ in range(9):
            assert torch.equal(linear_mx_mma_layout(x, *fragments, None, name, 512, 0), first)


def fp4(n=96, k=256):
    data, scale = packed("fp4_e2m1", n, k)
    return to_mma_layout(data, scale, MXSpec("fp4_e2m1"))


def test_strides_and_empty_batches():
    fragments, x = fp4(), torch.randn(2, 256, 3, device="cuda", dtype=torch.bfloat16)
    got = linear_mx_mma_layout(x.transpose(1, 2), *fragments, None, "fp4_e2m1", 96, 0)
    assert torch.equal(got, linear_mx_mma_layout(x.transpose(1, 2).contiguous(), *fragments, None, "fp4_e2m1", 96, 0))
    moved = torch.randn(3 * 256 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(3, 256)  # not on 16 bytes
    got = linear_mx_mma_layout(moved, *fragments, None, "fp4_e2m1", 96, 0)
    assert torch.equal(got, linear_mx_mma_layout(moved.clone(), *fragments, None, "fp4_e2m1", 96, 0))
    assert linear_mx_mma_layout(x[:0].transpose(1, 2), *fragments, None, "fp4_e2m1", 96, 0).shape == (0, 3, 96)


def test_a_nan_in_x_stays_in_its_row():
    fragments, x = fp4(), torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    want = linear_mx_mma_layout(x, *fragments, None, "fp4_e2m1", 96, 0)
    x[2, 5] = float("nan")
    got = linear_mx_mma_layout(x, *fragments, None, "fp4_e2m1", 96, 0)
    assert got[2].isnan().all() and torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])


@pytest.mark.parametrize("batch", [1, 100])
def test_cuda_graph(batch):
    fragments, x = fp4(), torch.randn(batch, 256, device="cuda", dtype=torch.bfloat16)
    linear_mx_mma_layout(x, *fragments, None, "fp4_e2m1", 96, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear_mx_mma_layout(x, *fragments, None, "fp4_e2m1", 96, 0)
    for _ in range(2):
        x.copy_(torch.randn(batch, 256))
        graph.replay()
        assert torch.equal(y, linear_mx_mma_layout(x, *fragments, None, "fp4_e2m1", 96, 0))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("batch", [1, 40])
def test_each_product_waits_for_the_one_before(batch, captured):
    """Kernels start before the ones ahead of them have ended; memory is used again in between."""
    fragments = to_mma_layout(*packed("fp4_e2m1", 2048, 2048), MXSpec("fp4_e2m1"))
    x = torch.randn(batch, 2048, device="cuda", dtype=torch.bfloat16)

    def chain(x, each):
        for _ in range(30):
            y = linear_mx_mma_layout(x, *fragments, None, "fp4_e2m1", 2048, 0)
            x = torch.nn.functional.normalize(linear_mx_mma_layout(y, *fragments, None, "fp4_e2m1", 2048, 0), dim=-1)
            each()
        return x

    want = chain(x, torch.cuda.synchronize)
    if not captured:
        assert all(torch.equal(chain(x, lambda: None), want) for _ in range(5))
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x, lambda: None)
    for _ in range(5):
        graph.replay()
        assert torch.equal(got, want)


def test_streams_run_side_by_side():
    fragments = [fp4() for _ in range(4)]
    inputs = [torch.randn(3, 256, device="cuda", dtype=torch.bfloat16) for _ in fragments]
    expected = [linear_mx_mma_layout(x, *f, None, "fp4_e2m1", 96, 0) for x, f in zip(inputs, fragments, strict=True)]
    torch.cuda.synchronize()
    got = []
    for x, f in zip(inputs, fragments, strict=True):
        with torch.cuda.stream(torch.cuda.Stream()):
            got.append([linear_mx_mma_layout(x, *f, None, "fp4_e2m1", 96, 0) for _ in range(20)])
    torch.cuda.synchronize()
    assert all(torch.equal(y, want) for ys, want in zip(got, expected, strict=True) for y in ys)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("batch", [1, 100])
def test_a_device_that_is_not_the_current_one(batch):
    fragments, x = fp4(), torch.randn(batch, 256, device="cuda", dtype=torch.bfloat16)
    want = linear_mx_mma_layout(x, *fragments, None, "fp4_e2m1", 96, 0)
    there = linear_mx_mma_layout(x.to("cuda:1"), *(f.to("cuda:1") for f in fragments), None, "fp4_e2m1", 96, 0)
    assert there.device == torch.device("cuda:1") and torch.equal(there.to("cuda:0"), want)


def test_groups():
    weight = torch.randn(4, 64, 128)
    scale, data = (t.cuda() for t in quantize_mx(weight, "mxfp4"))
    x = torch.randn(20, 128, device="cuda", dtype=torch.bfloat16)
    offs = torch.tensor([3, 3, 12, 20], dtype=torch.int32, device="cuda")
    got = grouped_linear_mx(x, data, scale, offs, "fp4_e2m1", 32)
    first = 0
    for expert, last in enumerate(offs.tolist()):
        want = linear_mx(x[first:last], data[expert], scale[expert], None, "fp4_e2m1", 32, 0)
        torch.testing.assert_close(got[first:last], want)
        first = last


def test_compiled():
    fragments, x = fp4(), torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)

    def run(x):
        return linear_mx_mma_layout(x.relu(), *fragments, None, "fp4_e2m1", 96, 0) + 1

    for mode in (None, "reduce-overhead"):
        assert torch.equal(torch.compile(run, mode=mode, fullgraph=True)(x), run(x))
