"""Checks of the arguments of a call: nesting, leaves, memory order, shared memory."""

import pytest
import torch
from torch import nn

from pt2mx import MXError
from pt2mx.pt2e.packages.pytree_args import (
    check_leaf,
    check_shared_memory,
    flatten_by_name,
    in_memory_order,
    memory_order,
)

NAMES = {"x": "d_x", "parts": ["d_parts_0", {"k": "d_parts_1_k", "times": "d_parts_1_times"}]}


def test_keys_count_and_not_their_order():
    expected = {"d_x": 1, "d_parts_0": 2, "d_parts_1_k": 3, "d_parts_1_times": 4}
    for arg in (
        {"x": 1, "parts": [2, {"k": 3, "times": 4}]},
        {"parts": (2, {"times": 4, "k": 3}), "x": 1},
    ):
        assert flatten_by_name(arg, NAMES, "d") == expected
    assert flatten_by_name(5, "n", "n") == {"n": 5}


def test_a_dict_may_lack_what_is_optional():
    arg = {"x": 1, "parts": [2, {"k": 3}]}
    assert flatten_by_name(arg, NAMES, "d", {"d_parts_1_times"}) == {"d_x": 1, "d_parts_0": 2, "d_parts_1_k": 3}
    with pytest.raises(MXError, match=r"d\['parts'\]\[1\] .* a dict of \['k', 'times'\], not a dict of \['k'\]"):
        flatten_by_name(arg, NAMES, "d", {"d_x"})


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ({"x": 1}, r"d must be nested as in the example: a dict of \['x', 'parts'\], not a dict of \['x'\]"),
        ({"x": 1, "part": []}, r"d must be .*, not a dict of \['x', 'part'\]"),
        ([1, [2, {}]], "d must be .*, not a list of 2"),
        ({"x": 1, "parts": [2]}, r"d\['parts'\] must be nested as in the example: a list of 2, not a list of 1"),
        ({"x": 1, "parts": {"0": 2}}, r"d\['parts'\] must be .*, not a dict of \['0'\]"),
        ({"x": 1, "parts": 7}, r"d\['parts'\] must be .*, not int"),
    ],
)
def test_other_nestings(arg, message):
    with pytest.raises(MXError, match=message):
        flatten_by_name(arg, NAMES, "d")


@pytest.mark.parametrize(
    ("leaf", "example", "sizes"),
    [
        (torch.zeros(3, 4), torch.zeros(2, 4), [(0, 3), (4, 4)]),
        (nn.Parameter(torch.zeros(3)), torch.zeros(2), [(0, None)]),
        (torch.tensor(True), torch.tensor(False), []),
        (5, 3, [(0, 9)]),
        ("a", "a", None),
        (None, None, None),
        (2.5, 2.5, None),
    ],
)
def test_leaves_that_fit(leaf, example, sizes):
    check_leaf("x", leaf, example, sizes)


@pytest.mark.parametrize(
    ("leaf", "example", "sizes", "message"),
    [
        (
            torch.zeros(4),
            torch.zeros(2),
            [(0, 3)],
            r"'x' must be of shape \(0 to 3,\) and torch.float32, not \(4,\)",
        ),
        (torch.zeros(1), torch.zeros(2), [(2, None)], r"of shape \(2 to any,\)"),
        (torch.zeros(2).bool(), torch.zeros(2), [(2, 2)], r"of shape \(2,\) and torch.float32, not \(2,\) torch.bool"),
        (torch.zeros(2, 2).to_sparse(), torch.zeros(2, 2), [(2, 2)] * 2, "must be of shape"),
        (torch.zeros(4, 3), torch.zeros(2, 3), [(2, 2), (3, 3)], "export the model with dynamic_shapes for others$"),
        (torch.zeros(4, 2), torch.zeros(2, 3), [(2, 2), (3, 3)], "float32$"),  # which more is wrong with
        ([0.0, 0.0], torch.zeros(2), [(2, 2)], "not list"),
        (10, 3, [(0, 9)], "must be a number of 0 to 9, not 10"),
        (True, 3, [(0, 9)], "must be a number"),
        (1, True, None, "the constant True of the export, and cannot be 1"),
        ("b", "a", None, "the constant 'a' of the export, and cannot be 'b'"),
        (torch.zeros(2), None, None, r"the constant None of the export, and cannot be \(2,\) torch.float32"),
    ],
)
def test_leaves_that_do_not_fit(leaf, example, sizes, message):
    with pytest.raises(MXError, match=message):
        check_leaf("x", leaf, example, sizes)


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.zeros(2, 3, 4), [0, 1, 2]),
        (torch.zeros(2, 3, 4).transpose(0, 2), [2, 1, 0]),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), [0, 2, 3, 1]),
        (torch.zeros(4, 1), [0, 1]),
        (torch.zeros(()), []),
        (torch.zeros(0, 3), [0, 1]),
    ],
)
def test_memory_order(tensor, order):
    assert memory_order(tensor) == order
    assert in_memory_order(tensor, order).stride() == tensor.stride()


def test_gaps_and_overlaps_go_and_the_order_stays():
    for tensor in (torch.randn(4, 6, 8)[:, ::2].transpose(0, 2), torch.randn(1, 6).expand(4, 6)):
        dense = in_memory_order(tensor, memory_order(tensor))
        assert torch.equal(dense, tensor) and memory_order(dense) == memory_order(tensor)
        assert dense.permute(memory_order(dense)).is_contiguous()


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
