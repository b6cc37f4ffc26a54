import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from pt2mx.kernels.axis import group_count, guards, has_length, pad_axis, split_axis, trim_axis


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
