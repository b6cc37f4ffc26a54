import pytest
import torch
from torch import nn

from pt2mx import MXError
from pt2mx.pt2e.packages.signature import Signature, check_leaf, in_memory_order, memory_order


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


@pytest.mark.parametrize(
    ("given", "example", "extents"),
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
def test_leaves_that_fit(given, example, extents):
    check_leaf("x", given, example, extents)


@pytest.mark.parametrize(
    ("given", "example", "extents", "message"),
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
        ([0.0, 0.0], torch.zeros(2), [(2, 2)], "not list"),
        (10, 3, [(0, 9)], "must be a number of 0 to 9, not 10"),
        (True, 3, [(0, 9)], "must be a number"),
        (1, True, None, "the constant True of the export, and cannot be 1"),
        ("b", "a", None, "the constant 'a' of the export, and cannot be 'b'"),
        (torch.zeros(2), None, None, r"the constant None of the export, and cannot be \(2,\) torch.float32"),
    ],
)
def test_leaves_that_do_not(given, example, extents, message):
    with pytest.raises(MXError, match=message):
        check_leaf("x", given, example, extents)


def test_a_condition_that_divides_by_nothing_is_not_met():
    guard = "L['x'].size()[0] % (L['x'].size()[0] // 2) == 0"
    signature = Signature((torch.zeros(4),), {}, ["x"], [[(0, None)]], ["x"], [guard], [])
    assert signature.checked((torch.zeros(8),), {})[0][0].shape == (8,)
    for length in (1, 7):
        with pytest.raises(MXError, match=r"must meet the condition x.shape\[0\] % \(x.shape\[0\] // 2\) == 0"):
            signature.checked((torch.zeros(length),), {})


def test_what_needs_no_copy_is_passed_on():
    signature = Signature(
        (torch.zeros(4, 2),), {"k": torch.zeros(1)}, ["x", "k"], [[(0, None), (2, 2)], [(1, 1)]], ["x"], [], []
    )
    x, k = torch.randn(3, 2), torch.randn(1)
    args, kwargs = signature.checked((x,), {"k": k})
    assert args[0] is x and kwargs["k"] is k
    (copied,), kwargs = signature.checked((torch.randn(2, 3).t(),), {"k": k})
    assert copied.is_contiguous() and kwargs["k"] is k


NESTED = Signature(
    ({"k": torch.zeros(2), "x": torch.zeros(2)}, torch.zeros(2)),
    {"times": 3},
    ["d_k", "d_x", "state", "times"],
    [[(2, 2)], [(2, 2)], [(2, 2)], None],
    ["d", "state"],
    [],
    ["state"],
)


def test_arguments_by_name_and_keys_in_any_order():
    k, x, state = torch.randn(2), torch.randn(2), torch.randn(2)
    for args, kwargs in (
        (({"k": k, "x": x}, state), {"times": 3}),
        (({"x": x, "k": k}, state), {"times": 3}),
        (({"x": x, "k": k},), {"times": 3, "state": state}),
        ((), {"times": 3, "state": state, "d": {"x": x, "k": k}}),
    ):
        (d, third), keywords = NESTED.checked(args, kwargs)
        assert list(d) == ["k", "x"] and d["k"] is k and d["x"] is x and third is state and keywords == {"times": 3}


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"d": {}, "times": 3}, "call it with the arguments d, state in this order and the keywords times"),
        (({}, torch.zeros(2)), {"d": {}, "times": 3}, "call it with the arguments d, state"),
        (({}, torch.zeros(2)), {"state": torch.zeros(2)}, "call it with"),
        (({}, torch.zeros(2), 3), {}, "call it with"),
        (({"k": torch.zeros(2)}, torch.zeros(2)), {"times": 3}, "the argument 'd' must be nested as in the example"),
    ],
)
def test_arguments_that_are_others(args, kwargs, message):
    with pytest.raises(MXError, match=message):
        NESTED.checked(args, kwargs)


def test_what_is_written_shares_no_memory():
    x = torch.randn(4)
    with pytest.raises(MXError, match="the input 'state' is written to, and shares memory with 'd_x'"):
        NESTED.checked(({"k": torch.zeros(2), "x": x[1:3]}, x[:2]), {"times": 3})
    NESTED.checked(({"k": x[:2], "x": x[:2]}, x[2:]), {"times": 3})
