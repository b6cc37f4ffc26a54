import pytest
import torch
from torch.export import Dim

from pt2mx.pt2e.packages.extents import symbols
from pt2mx.pt2e.packages.trial import trial
from tests.models import Double


@pytest.mark.parametrize("extent", [0, 1, 3, 5])
def test_values_are_cut_or_repeated_in_the_order_of_the_memory(extent):
    x = torch.randn(4, 3, 5).transpose(0, 2)
    program = torch.export.export(Double(), (x,), dynamic_shapes=({1: Dim("n")},))
    seen = []

    def compiled(given):
        seen.append(given)
        return given * 2

    (symbol,) = symbols(program)
    assert trial(program, program.module(), compiled)({symbol: extent}) is True
    (given,) = seen
    assert torch.equal(given, torch.cat([x, x], 1)[:, :extent])
    assert given.permute(2, 1, 0).is_contiguous()


def test_what_is_taken_and_what_agrees():
    program = torch.export.export(Double(), (torch.ones(4),), dynamic_shapes=({0: Dim("n", max=5)},))
    (symbol,) = symbols(program)
    agree = trial(program, program.module(), lambda x: x * 2 if len(x) > 2 else x)
    assert [agree({symbol: n}) for n in (2, 3, 5, 6, -1)] == [False, True, True, None, None]
