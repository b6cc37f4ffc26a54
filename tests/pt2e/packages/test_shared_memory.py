import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.packages.shared_memory import check_shared_memory


def test_an_input_that_is_written_shares_memory_with_none():
    x = torch.randn(6, 4)
    message = r"is written to, and shares memory with .*: pass a clone of one of them"
    for other in (x, x[2:], x.view(-1)[5:7], x.t(), x[5:, 3:]):
        for written in (["state"], ["x"], ["state", "x"]):
            with pytest.raises(MXError, match=message):
                check_shared_memory({"x": x, "state": other}, written)
        check_shared_memory({"x": x, "state": other}, [])
        check_shared_memory({"x": x, "state": other, "y": torch.zeros(2)}, ["y"])


def test_parts_of_one_storage_that_do_not_overlap():
    x = torch.randn(6, 4)
    check_shared_memory({"x": x[:3], "state": x[3:], "n": 3, "none": x[:0]}, ["x", "state", "none"])
