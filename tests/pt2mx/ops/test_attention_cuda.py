import pytest
import torch

from pt2mx import FORMATS
from pt2mx.ops.attention import AttentionMX, attention_mx
from pt2mx.ops.decoding import decoding_attention_mx
from tests.attention import close, packed

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_formats_and_dtypes(name, dtype):
    args, want = packed(name, dtype, device="cuda")
    close(attention_mx(*args), want, dtype)


@pytest.mark.parametrize(
    "sizes",
    [(1, 3, 3, 4, 300, 128, 64), (3, 4, 1, 2, 33, 32, 128), (1, 32, 8, 1, 5000, 128, 128), (2, 2, 1, 40, 50, 64, 64)],
)
@pytest.mark.parametrize("block", [32, 64, 256])
def test_shapes_and_blocks(sizes, block):
    args, want = packed("fp8_e4m3", torch.bfloat16, sizes, block, device="cuda")
    close(attention_mx(*args), want, torch.bfloat16)


@pytest.mark.parametrize("shape", [(2, 1, 1, 777), (1, 8, 1, 777), (2, 8, 1, 777)])
def test_masks(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[..., 300:] = False
    args, want = packed("fp4_e2m1", torch.bfloat16, (2, 8, 2, 1, 777, 64, 64), mask=mask, device="cuda")
    close(attention_mx(*args), want, torch.bfloat16)


def test_a_query_that_sees_nothing_gives_zeros():
    mask = torch.ones(2, 1, 1, 77, dtype=torch.bool)
    mask[1] = False
    args, _ = packed("fp8_e4m3", torch.bfloat16, mask=mask, device="cuda")
    got = attention_mx(*args)
    assert got[0].abs().sum() > 0 and not got[1].any()


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e2m3", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("scale", [0, 1, 0xFF])
def test_extreme_scales(name, scale):
    args, _ = packed(name, torch.bfloat16, (2, 8, 2, 1, 77, 64, 64), device="cuda")
    for tensor in args:
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.uint8 and tensor.shape[-1] == 2:
            tensor[1, 1, 40:50] = scale
    got, want = attention_mx(*args), attention_mx(*(a.cpu() if isinstance(a, torch.Tensor) else a for a in args))
    assert torch.equal(got.isnan().cpu(), want.isnan()) and want[0].isfinite().all()
    close(got.nan_to_num(), want.nan_to_num().cuda(), torch.bfloat16)


def test_a_captured_graph_gives_the_same_bits():
    args, _ = packed("fp8_e4m3", torch.bfloat16, (1, 32, 8, 1, 2000, 128, 128), device="cuda")
    want = attention_mx(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention_mx(*args)
    graph.replay()
    assert torch.equal(got, want)


def test_the_kernel_runs(monkeypatch):
    def refused(*_):
        raise AssertionError("the definition was called")

    monkeypatch.setattr(AttentionMX, "define", refused)
    args, want = packed("fp6_e3m2", torch.bfloat16, device="cuda")
    close(attention_mx(*args), want, torch.bfloat16)


JOINED = [  # batch, heads, heads of the keys, queries, slots, width, width of the values
    *((2, 8, 2, 1, slots, 64, 64) for slots in (1, 15, 100, 512, 1030, 2048)),
    (1, 32, 8, 1, 5000, 128, 128),  # too few pairs: a second kernel joins
    (16, 32, 8, 1, 3000, 128, 128),
    (3, 4, 1, 2, 300, 32, 128),
    (1, 4, 1, 1, 700, 256, 256),
    (2, 16, 1, 1, 900, 128, 64),  # more than 8 queries of a head
]


@pytest.mark.parametrize("sizes", JOINED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_last_program_joins_the_splits(name, dtype, sizes):
    mask = torch.rand(sizes[0], 1, 1, sizes[4], generator=torch.Generator().manual_seed(0)) < 0.7
    mask[..., 0] = True
    zeros = torch.zeros(128, dtype=torch.int32, device="cuda")
    for seen in (None, mask):
        args, want = packed(name, dtype, sizes, mask=seen, scale=0.3, device="cuda")
        got = decoding_attention_mx(*args, zeros)
        close(got, want, dtype)
        for _ in range(10):
            assert torch.equal(got, decoding_attention_mx(*args, zeros))
        assert not zeros.any()
        close(decoding_attention_mx(*args, None), want, dtype)


@pytest.mark.parametrize(
    "sizes", [(2, 8, 2, 1, 300, 64, 64), (1, 32, 8, 1, 1500, 128, 128), (2, 16, 1, 1, 77, 32, 256)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "block", "scale_format"),
    [("fp4_e2m1", 16, "e4m3"), ("fp8_e4m3", 32, "bf16"), ("fp6_e2m3", 64, "f32"), ("fp4_e2m1", 16, None)],
)
def test_other_scales_and_small_blocks(name, block, scale_format, dtype, sizes, monkeypatch):
    monkeypatch.setattr(AttentionMX, "define", None)
    mask = torch.rand(sizes[0], 1, 1, sizes[4], generator=torch.Generator().manual_seed(0)) < 0.7
    mask[..., 0] = True
    zeros = torch.zeros(8, dtype=torch.int32, device="cuda")
    args, want = packed(name, dtype, sizes, block, mask, device="cuda", scale_format=scale_format)
    close(attention_mx(*args, scale_format), want, dtype)
    got = decoding_attention_mx(*args, zeros, scale_format)
    close(got, want, dtype)
    assert torch.equal(got, decoding_attention_mx(*args, zeros, scale_format)) and not zeros.any()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_at_odd_addresses(name, dtype):
    args, want = packed(name, dtype, (2, 8, 2, 1, 77, 128, 128), device="cuda")
    shifted = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in args[:5]]
    assert all(x.data_ptr() % 4 and x.is_contiguous() for x in shifted)
    close(attention_mx(*shifted, *args[5:]), want, dtype)


def test_more_sequences_than_a_grid_has_programs():
    args, want = packed("fp8_e4m3", torch.bfloat16, (8192, 8, 8, 1, 2, 32, 32), device="cuda")
    close(attention_mx(*args), want, torch.bfloat16)


def test_a_result_without_heads():
    args, _ = packed("fp8_e4m3", torch.bfloat16, device="cuda")
    assert attention_mx(*(x[:, :0] for x in args[:5]), *args[5:]).shape == (2, 0, 1, 64)


@pytest.mark.parametrize("block", [24, 96])
def test_blocks_of_other_sizes_are_the_definition(block):
    args, want = packed("fp8_e4m3", torch.bfloat16, (2, 8, 2, 1, 77, 128, 128), block, device="cuda")
    close(attention_mx(*args), want, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_calls_in_a_graph_share_the_counters(dtype):
    mask = torch.ones(2, 1, 1, 512, dtype=torch.bool)
    mask[1] = False
    args, _ = packed("fp4_e2m1", dtype, (2, 8, 2, 1, 512, 128, 128), mask=mask, device="cuda")
    zeros = torch.zeros(4, dtype=torch.int32, device="cuda")
    want = decoding_attention_mx(*args, zeros)
    assert want[0].any() and not want[1].any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = args[0]
        for _ in range(4):
            got = decoding_attention_mx(query, *args[1:], zeros)
            query = args[0] + 0 * got
    for _ in range(20):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want) and not zeros.any()
