import numpy as np
import pytest
import torch

from mx_conformance.conventions import PACKINGS, packings
from pt2mx import ELEMENTS, quantize_mx
from pt2mx.kernels import reference


@pytest.mark.parametrize(("name", "bits"), [(name, bits) for name, p in PACKINGS.items() for bits in p.widths])
def test_unpacking_inverts_packing(name, bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 64), np.uint8)
    data = PACKINGS[name].pack(codes, bits)
    assert data.dtype == np.uint8 and data.shape == (3, 64 if name == "bytes" else 8 * bits)
    assert (PACKINGS[name].unpack(data, bits) == codes).all()


def test_known_bytes():
    codes = np.array([[1, 2, 3, 15] + [0] * 27 + [7]], np.uint8)
    assert PACKINGS["low_first"].pack(codes, 4)[0, :2].tolist() == [0x21, 0xF3]
    assert PACKINGS["high_first"].pack(codes, 4)[0, :2].tolist() == [0x12, 0x3F]
    assert PACKINGS["halves"].pack(codes, 4)[0, [0, 1, 15]].tolist() == [0x01, 0x02, 0x70]
    assert PACKINGS["high_first"].pack(codes, 6)[0, :3].tolist() == [0x04, 0x20, 0xCF]


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e3m2", "fp8_e4m3"])
def test_low_first_is_the_packing_of_pt2mx(name):
    bits = ELEMENTS[name].bits
    _, data = quantize_mx(torch.randn(2, 32), name)
    codes = reference.unpack(data, 1, bits)
    assert (PACKINGS["low_first"].unpack(data.numpy(), bits) == codes.numpy()).all()


def test_packings_of_an_element():
    assert packings(ELEMENTS["fp8_e4m3"]) == ("low_first",)
    assert packings(ELEMENTS["fp6_e2m3"]) == ("low_first", "high_first", "bytes")
    assert packings(ELEMENTS["fp4_e2m1"]) == ("low_first", "high_first", "halves", "bytes")
