import pytest
import torch

from pt2mx import MXError
from pt2mx.torchmx.utils import pack_uint4, unpack_uint4


def test_nibbles():
    codes = torch.randint(16, (3, 4, 6), dtype=torch.uint8)
    for dim in (0, 1, -1):
        packed = pack_uint4(codes, dim)
        assert packed.shape[dim] == (codes.shape[dim] + 1) // 2
        assert torch.equal(unpack_uint4(packed, dim).narrow(dim, 0, codes.shape[dim]), codes)
        assert torch.equal(packed.select(dim, 0), codes.select(dim, 0) << 4 | codes.select(dim, 1))
    for bad in (codes.int(), codes.float()):
        with pytest.raises(MXError, match="4-bit codes are uint8"):
            pack_uint4(bad)
    with pytest.raises(MXError, match="have dimension 3"):
        unpack_uint4(codes, 3)
    with pytest.raises(MXError, match="have dimension a"):
        pack_uint4(torch.zeros(4, dtype=torch.uint8), "a")
