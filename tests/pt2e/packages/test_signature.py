import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.packages.signature import Signature


def test_a_condition_that_divides_by_zero_is_not_met():
    guard = "L['x'].size()[0] % (L['x'].size()[0] // 2) == 0"
    signature = Signature((torch.zeros(4),), {}, ["x"], [[(0, None)]], ["x"], [guard], [])
    assert signature.checked((torch.zeros(8),), {})[0][0].shape == (8,)
    for length in (1, 7):
        with pytest.raises(MXError, match=r"must meet the condition x.shape\[0\] % \(x.shape\[0\] // 2\) == 0"):
            signature.checked((torch.zeros(length),), {})


def test_tensors_are_copied_only_where_necessary():
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
def test_wrong_arguments(args, kwargs, message):
    with pytest.raises(MXError, match=message):
        NESTED.checked(args, kwargs)


def test_an_input_that_is_written_shares_no_memory():
    x = torch.randn(4)
    with pytest.raises(MXError, match="the input 'state' is written to, and shares memory with 'd_x'"):
        NESTED.checked(({"k": torch.zeros(2), "x": x[1:3]}, x[:2]), {"times": 3})
    NESTED.checked(({"k": x[:2], "x": x[:2]}, x[2:]), {"times": 3})
