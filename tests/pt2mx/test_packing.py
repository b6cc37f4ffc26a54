import pytest
import torch

from pt2mx.kernels.packing import is_packed, pack, packed_length, unpack, unpacked_length


def test_four_bit_codes_low_nibble_first():
    codes = torch.tensor([1, 2, 3, 4, 15], dtype=torch.int32)
    assert pack(codes, 0, 4).tolist() == [0x21, 0x43, 0x0F]


def test_six_bit_codes_in_three_little_endian_bytes():
    codes = torch.tensor([1, 2, 3, 63], dtype=torch.int32)
    word = 1 | 2 << 6 | 3 << 12 | 63 << 18
    assert pack(codes, 0, 6).tolist() == [word & 255, word >> 8 & 255, word >> 16]


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 31, 32])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_unpack_inverts_pack(bits, length, axis):
    shape = [2, 3, 4]
    shape[axis] = length
    codes = torch.randint(1 << bits, shape, dtype=torch.int32)
    data = pack(codes, axis, bits)
    assert data.dtype == torch.uint8 and data.shape[axis] == packed_length(length, bits)
    codes_again = unpack(data, axis, bits)
    assert codes_again.shape[axis] == unpacked_length(data.shape[axis], bits) >= length
    assert torch.equal(codes_again.narrow(axis, 0, length), codes)
    assert not codes_again.narrow(axis, length, codes_again.shape[axis] - length).any()


def test_which_widths_share_bytes():
    assert [is_packed(bits) for bits in (4, 6, 8)] == [True, True, False]
