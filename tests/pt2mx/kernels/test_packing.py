import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pt2mx import ELEMENTS, MXSpec, MXTensor, dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.kernels import packing
from pt2mx.kernels.cpu import quantize as cpu
from pt2mx.kernels.packing import (
    group_count,
    guards,
    has_length,
    is_packed,
    pack,
    packed_length,
    pad_axis,
    split_axis,
    trim_axis,
    unpack,
    unpacked_length,
)
from tests.cpu_kernels import check_cpu
from tests.random_values import random_values


@pytest.fixture
def all_packed(monkeypatch, compiler):
    """The table with a row for every width."""
    for bits in range(2, 8):
        monkeypatch.setitem(packing._GROUPS, bits, (8 // math.gcd(bits, 8), bits // math.gcd(bits, 8)))
    cpu.spec_of.cache_clear()
    yield
    cpu.spec_of.cache_clear()


def test_four_bit_codes_low_nibble_first():
    codes = torch.tensor([1, 2, 3, 4, 15], dtype=torch.int32)
    assert pack(codes, 0, 4).tolist() == [0x21, 0x43, 0x0F]


def test_six_bit_codes_in_three_little_endian_bytes():
    codes = torch.tensor([1, 2, 3, 63], dtype=torch.int32)
    word = 1 | 2 << 6 | 3 << 12 | 63 << 18
    assert pack(codes, 0, 6).tolist() == [word & 255, word >> 8 & 255, word >> 16]


def test_wide_codes_in_two_little_endian_bytes():
    codes = torch.tensor([1, 0x1234, 0xFFFF], dtype=torch.int32)
    assert pack(codes, 0, 16).tolist() == [1, 0, 0x34, 0x12, 0xFF, 0xFF]
    assert pack(codes[:1], 0, 9).view(torch.uint16).tolist() == [1]


@pytest.mark.usefixtures("all_packed")
@pytest.mark.parametrize("bits", [*range(2, 10), 12, 16])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_unpack_inverts_pack(bits, axis):
    assert 8 * packed_length(32, bits) == 32 * (bits if bits <= 8 else 16)
    shape = [2, 3, 4]
    for length in (0, 1, 2, 3, 4, 5, 31, 32):
        shape[axis] = length
        codes = torch.randint(1 << bits, shape, dtype=torch.int32)
        data = pack(codes, axis, bits)
        assert data.dtype == torch.uint8 and data.shape[axis] == packed_length(length, bits)
        codes_again = unpack(data, axis, bits)
        assert codes_again.shape[axis] == unpacked_length(data.shape[axis], bits) >= length
        assert torch.equal(codes_again.narrow(axis, 0, length), codes)
        assert not codes_again.narrow(axis, length, codes_again.shape[axis] - length).any()


def test_which_widths_share_bytes():
    assert [is_packed(bits) for bits in (4, 6, 8, 16)] == [True, True, False, False]


@pytest.mark.compiled_except("fp5_e2m2", "int2", "fp7_e4m2")
@pytest.mark.usefixtures("all_packed")
@pytest.mark.parametrize("name", ["fp3_e1m1", "fp5_e2m2", "fp7_e4m2", "int2", "int5"])
def test_kernels_follow_the_table_of_widths(name):
    """Of whole tiles, of parts of them, and where up to eight blocks share a group."""
    shapes = [((3, 1), 1), ((7, 70), 1), ((70, 7), 0), ((3, 33, 300), 1), ((2, 19, 1000), 1), ((1, 40, 3000), 1)]
    for i, (shape, axis) in enumerate(shapes):
        for block in (1, 3, 32, 33, 1000):
            check_cpu(random_values(shape, torch.float32, i % 5), MXSpec(name, block, axis, ("floor", "mse")[i % 2]))


@pytest.mark.usefixtures("all_packed")
@pytest.mark.parametrize("name", ["fp3_e1m1", "fp5_e2m2", "int7"])
@pytest.mark.parametrize(("k", "block"), [(64, 32), (70, 24), (7, 32), (33, 5)])
def test_matmuls_follow_the_table_of_widths(name, k, block):
    weight = torch.randn(9, k)
    scale, data = quantize_mx(weight, name, block)
    assert data.shape[1] == packed_length(k, ELEMENTS[name].bits) < k + 8
    for rows in (1, 3, 40):
        x = torch.randn(rows, k)
        want = torch.nn.functional.linear(x, fake_quantize_mx(weight, name, block))
        torch.testing.assert_close(torch.ops.pt2mx.linear_mx(x, data, scale, None, name, block, 0), want)


@pytest.mark.usefixtures("all_packed")
@pytest.mark.compiled
def test_compiled_code_and_tensors_follow_the_table_of_widths():
    x = torch.randn(3, 70)
    for got, want in zip(torch.compile(lambda x: quantize_mx(x, "int7"))(x), quantize_mx(x, "int7"), strict=True):
        assert torch.equal(got, want)
    tensor = MXTensor.to_mx(x, "int7")
    assert torch.equal(tensor[:, :64].to_dtype(), tensor.to_dtype()[:, :64])
    assert torch.equal(dequantize_mx(tensor.qdata, tensor.scale, "int7", length=70), tensor.to_dtype())


@pytest.mark.cuda
@pytest.mark.usefixtures("all_packed")
@pytest.mark.parametrize("name", ["fp3_e1m1", "fp5_e2m2", "fp7_e4m2", "int2", "int5"])
def test_kernels_of_a_gpu_follow_the_table_of_widths(name):
    for dtype in (torch.float32, torch.bfloat16):
        for shape, axis in (((7, 64), 1), ((7, 70), 1), ((64, 40), 0), ((2, 19, 300), 1)):
            for block in (3, 16, 32, 1000):
                x = torch.randn(shape).to(dtype)
                want = quantize_mx(x, name, block, axis)
                got = quantize_mx(x.cuda(), name, block, axis)
                assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
                values = [dequantize_mx(d, s, name, block, dtype, axis, shape[axis]) for s, d in (got, want)]
                assert torch.equal(values[0].cpu(), values[1])


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6"])
@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("axis", [0, 1])
def test_compiled_code_of_a_gpu_fills_the_last_group_with_zeros(name, length, axis, compiler):
    x = torch.randn(300, length).movedim(1, axis).contiguous()
    got = torch.compile(lambda x: quantize_mx(x, name, axis=axis), fullgraph=True)(x.cuda())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, quantize_mx(x, name, axis=axis), strict=True))


@pytest.mark.parametrize(("length", "count"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_whole_groups(length, count):
    x = torch.arange(2 * length).reshape(2, length) + 1
    padded, groups = pad_axis(x, 1, 4), split_axis(x, 1, 4)
    assert group_count(length, 4) == count
    assert padded.shape == (2, 4 * count) and groups.shape == (2, count, 4)
    assert torch.equal(padded[:, :length], x) and not padded[:, length:].any()
    assert torch.equal(groups.flatten(1), padded)
    assert torch.equal(trim_axis(padded, 1, length), x)


def test_what_has_its_length_is_not_cut():
    x = torch.ones(2, 3)
    assert has_length(x, 1, 3) and not has_length(x, 1, 2)
    assert trim_axis(x, 1, 3) is x


@pytest.mark.parametrize(("length", "guarded", "count"), [(3, True, 1), (8, True, 2), (3, False, 2), (8, False, 3)])
def test_symbolic_lengths_have_a_group_more_where_nothing_guards_them(length, guarded, count):
    def split(x):
        with guards(guarded):
            assert not has_length(x, 0, x.shape[0])
            return split_axis(x, 0, 4)

    x = torch.arange(1.0, length + 1)
    groups = make_fx(split, tracing_mode="symbolic")(x)(x)
    assert groups.shape == (count, 4)
    assert torch.equal(groups.flatten()[:length], x) and not groups.flatten()[length:].any()
