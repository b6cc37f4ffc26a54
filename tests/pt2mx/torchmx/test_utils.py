import logging

import pytest
import torch

from pt2mx import MXError
from pt2mx.torchmx.utils import get_logger, get_uniform_random_number, pack_uint4, set_seed, unpack_uint4


def test_random_numbers_are_those_of_torchs_generator():
    set_seed(3)
    x = get_uniform_random_number(-1, 3, (4, 5), torch.float32)
    assert torch.equal(x, torch.rand(4, 5, generator=torch.Generator().manual_seed(3)) * 4 - 1)


def test_a_logger_writes_each_line_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LOG_FILE", str(tmp_path / "log"))
    monkeypatch.setenv("LOG_LEVEL", "WARNING")
    for _ in range(2):
        logger = get_logger("pt2mx.test", "%(name)s: %(message)s")
    try:
        logger.warning("seen")
        logger.info("not seen")
        assert capsys.readouterr().err == (tmp_path / "log").read_text() == "pt2mx.test: seen\n"
        assert logger is logging.getLogger("pt2mx.test") and not logger.propagate
    finally:
        for handler in [*logger.handlers]:
            handler.close()
            logger.removeHandler(handler)


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
