"""The operator attention_mx: schema, errors, formats, shapes, masks, compilation."""

import pytest
import torch
from torch.nn import functional as F

import pt2mx
from pt2mx import FORMATS, MXError, ops
from pt2mx.kernels import select
from pt2mx.kernels.cpu import attention as cpu_attention
from pt2mx.ops.attention import AttentionMX, attention_mx
from pt2mx.ops.decoding import decoding_attention_mx
from tests.attention import close, packed
from tests.threads import on_threads


@pytest.fixture(params=["matrix instructions", "fp32 vectors"])
def kernel(request, monkeypatch):
    """Both kernels of the CPU, on a processor with AMX; elsewhere the second one twice."""
    if request.param == "fp32 vectors":
        monkeypatch.setattr(cpu_attention, "isa_for", lambda spec, width: 0)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_formats_and_dtypes(name, dtype):
    args, want = packed(name, dtype)
    close(attention_mx(*args), want, dtype)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("sizes", [(1, 3, 3, 4, 300, 128, 64), (3, 4, 1, 2, 33, 32, 96), (2, 2, 1, 40, 50, 64, 64)])
@pytest.mark.parametrize("block", [8, 32, 64, 256])
def test_shapes_and_blocks(sizes, block):
    args, want = packed("fp8_e4m3", torch.float32, sizes, block)
    close(attention_mx(*args), want, torch.float32)


@pytest.mark.parametrize("width", [16, 40, 544])
def test_widths_that_no_kernel_takes(width):
    args, want = packed("fp6_e3m2", torch.float32, (2, 4, 2, 1, 20, width, width))
    close(attention_mx(*args), want, torch.float32)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", [(2, 1, 1, 77), (1, 8, 1, 77), (2, 8, 1, 77), (1, 1, 1, 77)])
def test_masks(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    args, want = packed("fp4_e2m1", torch.float32, mask=mask)
    close(attention_mx(*args), want, torch.float32)
    strided = torch.stack([mask, ~mask], -1)[..., 0]
    assert torch.equal(attention_mx(*args[:8], strided, args[9]), attention_mx(*args))


@pytest.mark.usefixtures("kernel")
def test_a_query_that_sees_nothing_gives_zeros():
    mask = torch.ones(2, 1, 1, 77, dtype=torch.bool)
    mask[1] = False
    args, _ = packed("fp8_e4m3", torch.float32, mask=mask)
    got = attention_mx(*args)
    assert got[0].abs().sum() > 0 and not got[1].any()
    hidden = AttentionMX.function(AttentionMX.decompose)(*args)  # as torch's own attention does
    assert not hidden[1].any()


@pytest.mark.usefixtures("kernel")
def test_values_that_are_no_numbers():
    (query, *cache, name, block, width, mask, scale), _ = packed("fp8_e4m3", torch.float32)
    cache[1][0, 0, 3] = 255  # a block that held an Inf or a NaN
    got = attention_mx(query, *cache, name, block, width, mask, scale)
    assert got[0, :4].isnan().all() and got[0, 4:].isfinite().all() and got[1].isfinite().all()
    cache[1][0, 0, 3] = 127
    cache[2][0, 1, 5, 7] = 127  # the code of a NaN
    got = attention_mx(query, *cache, name, block, width, mask, scale)
    assert got[0, 4:, :, 7].isnan().all() and got.isnan().sum() == 4


@pytest.mark.usefixtures("kernel")
def test_the_scale_and_large_scores():
    args, want = packed("fp8_e4m3", torch.float32, scale=40.0)
    close(attention_mx(*args), want, torch.float32)
    assert not torch.allclose(want, packed("fp8_e4m3", torch.float32)[1])


def test_two_threads_give_the_bits_of_one():
    args, _ = packed("fp8_e4m3", torch.bfloat16)
    assert torch.equal(*on_threads(lambda: attention_mx(*args), 1, 2))


@pytest.mark.compiled
@pytest.mark.slow_except("avx2")
def test_other_processors(on_other_processors):
    on_other_processors(__file__, "formats_and_dtypes or shapes_and_blocks or masks or nothing or no_numbers")


def test_opcheck_and_compilation():
    args, _ = packed("fp6_e2m3", torch.bfloat16, mask=torch.ones(2, 1, 1, 77, dtype=torch.bool))
    torch.library.opcheck(attention_mx, args)
    compiled = torch.compile(lambda query, *rest: attention_mx(query * 2, *rest) + 1, fullgraph=True)
    assert torch.equal(compiled(*args), attention_mx(args[0] * 2, *args[1:]) + 1)


def test_without_kernels(monkeypatch):
    args, want = packed("fp8_e4m3", torch.float32)
    monkeypatch.setattr(select, "_device_of", lambda _: None)
    close(attention_mx(*args), want, torch.float32)


@pytest.mark.usefixtures("kernel")
def test_a_repeated_call_has_the_bits_of_the_first():
    mask = torch.ones(2, 1, 1, 77, dtype=torch.bool)
    args, _ = packed("fp8_e4m3", torch.bfloat16, mask=mask)
    first = attention_mx(*args)
    mask[:, :, :, 40:] = False
    hidden = attention_mx(*args)  # another mask in the same memory
    assert not torch.equal(first, hidden)
    mask.fill_(True)
    assert torch.equal(attention_mx(*(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args)), first)
    cache = [tensor[:, :, ::2] for tensor in args[1:5]]  # other strides
    got = attention_mx(args[0], *cache, *args[5:8], mask[..., ::2], None)
    assert torch.equal(got, attention_mx(args[0], *map(torch.clone, cache), *args[5:8], mask[..., ::2].clone(), None))
    with pytest.raises(MXError, match="a query of 1 sequences"):
        attention_mx(args[0][:1], *args[1:])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp4_e2m1", "int8", "int8_full"])
def test_extreme_scales_and_queries(name):
    """Values that bfloat16 matrix instructions would take for zero, and codes without a magnitude."""
    (query, keys, key_scale, values, value_scale, *rest), _ = packed(name, torch.float32, block=32)
    keys[0, 0, 0] = values[0, 1, 1] = 0x80
    key_scale[0, 1, 4], value_scale[1, 0, 5] = 250, 0
    key_scale[1, 0], value_scale[1, 1] = 2, 1
    key_scale[1, 1, 0], keys[1, 1, 0] = 0, 0
    query[1, 7] *= 1e-30
    query[0, 0, 0, 3] = -float("inf")
    args = query, keys, key_scale, values, value_scale, *rest
    want = AttentionMX.function(AttentionMX.decompose)(*args)
    got = attention_mx(*args)
    assert torch.equal(got.isnan(), want.isnan()) and got[0, 0].isnan().all()
    error, largest = ((x.nan_to_num().abs()).amax((2, 3)) for x in (got - want, want))
    assert (error <= 1e-6 * largest).all() and (largest[1, 4:] < 1e-33).all()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("spec", ["nvfp4", "fp8_e4m3{16}(e4m3)", "int8{32}(bf16)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_with_a_significand(spec, dtype):
    spec = pt2mx.parse(spec)
    generator = torch.Generator().manual_seed(0)
    query, *new = (torch.randn(2, heads, 50, 64, generator=generator).to(dtype) for heads in (6, 3, 3))
    scales = [torch.tensor(t) for t in (1.0, 0.75)] if spec.scale_format.tensor else [None, None]
    pairs = [pt2mx.quantize_mx(x, spec, tensor_scale=t) for x, t in zip(new, scales, strict=True)]
    cache = [tensor for scale, codes in pairs for tensor in (codes, scale)]
    modes = spec.element.name, spec.block_size, 64, None, None, spec.scale_format.name, *scales
    got = attention_mx(query[:, :, :3], *cache, *modes)
    cached = [
        pt2mx.dequantize_mx(codes, scale, spec, tensor_scale=t) for (scale, codes), t in zip(pairs, scales, strict=True)
    ]
    want = F.scaled_dot_product_attention(query[:, :, :3].float(), *cached, enable_gqa=True)
    close(got, want, dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0][0], *a[1:]), r"query \(8, 1, 64\)"),
        (lambda a: (a[0][:1], *a[1:]), "a query of 1 sequences"),
        (lambda a: (a[0][:, :3], *a[1:]), "and 3 heads"),
        (lambda a: (*a[:8], torch.ones(2, 1, 1, 77), None), "the mask is torch.float32 of 4 dimensions"),
        (lambda a: (*a[:5], "fp3", *a[6:]), "fp3"),
        (lambda a: (*a[:7], 32, *a[8:]), "32"),
        (lambda a: (a[0].double(), *a[1:]), "float64"),
        (lambda a: (*a[:3], a[3][:, :, :5], *a[4:]), "keys"),
        (lambda a: (*a[:8], torch.ones(3, 1, 1, 77, dtype=torch.bool), None), "a mask of"),
        (lambda a: (*a[:8], torch.ones(2, 1, 1, 7, dtype=torch.bool), None), "a mask of"),
        (lambda a: (a[0], *(t[:, :0] for t in a[1:5]), *a[5:]), "and 0 heads"),
    ],
)
def test_bad_input(change, message):
    args, _ = packed("fp8_e4m3", torch.float32)
    with pytest.raises(MXError, match=message):
        attention_mx(*change(args))


@pytest.mark.parametrize("dimension", [0, 1])
def test_an_empty_result(dimension):
    """Attend without sequences, and without heads."""
    args, _ = packed("fp8_e4m3", torch.bfloat16)
    tensors = [tensor.narrow(dimension, 0, 0) for tensor in args[:5]]
    for got in (attention_mx(*tensors, *args[5:]), decoding_attention_mx(*tensors, *args[5:], None)):
        assert got.shape == tensors[0].shape and got.dtype == torch.bfloat16


def test_it_is_what_the_dequantized_cache_gives():
    args, want = packed("int8", torch.float32)
    query, key, key_scale, value, value_scale, name, block, width, _, _ = args
    keys = ops.dequantize_mx(key, key_scale, name, block, torch.float32, -1, 64)
    values = ops.dequantize_mx(value, value_scale, name, block, torch.float32, -1, width)
    assert torch.equal(want, F.scaled_dot_product_attention(query, keys, values, enable_gqa=True))
