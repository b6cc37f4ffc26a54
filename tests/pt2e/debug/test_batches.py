import math
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn

from pt2mx import MXError
from pt2mx.pt2e.debug.batches import arguments_of, call, check_values, leaves_of, named_leaves, several
from tests.models import module_of

IDS = torch.tensor([0, 3])
BATCH = {"ids": IDS, "by": (2.0,), "rest": {"bias": torch.ones(8)}}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    scaled = module_of(
        lambda self, ids, *, by, rest: self.embedding(ids) * by[0] + rest["bias"], embedding=nn.Embedding(4, 8)
    )
    return torch.export.export(scaled.eval(), (IDS,), {"by": (2.0,), "rest": BATCH["rest"]}).module()


def test_arguments_by_position_and_by_name(model):
    for batch in (BATCH, UserDict(BATCH), tuple(BATCH.values()), list(BATCH.values())):
        (ids,), keywords = arguments_of(model, batch)
        assert ids is IDS and keywords == {"by": (2.0,), "rest": BATCH["rest"]}
        assert list(named_leaves(model, batch)) == ["ids", "by_0", "rest_bias"]
        assert torch.equal(call(model, batch), model(IDS, by=(2.0,), rest=BATCH["rest"]))


def test_a_call_writes_to_a_copy():
    x = torch.zeros(3)
    model = torch.export.export(module_of(lambda self, x: x.add_(1)), (x.clone(),)).module()
    for batch in (x, (x,), [x], {"x": x}):
        assert torch.equal(call(model, batch), torch.ones(3)) and not x.any()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ids": None}, "the model takes a tensor as ids, and a batch holds a NoneType"),
        ({"ids": np.arange(2)}, "the model takes a tensor as ids, and a batch holds a ndarray"),
        ({"rest": {"bias": "one"}}, "the model takes a tensor as rest_bias, and a batch holds a str"),
        ({"rest": {}}, "the model takes 3 tensors and numbers, and a batch holds 2"),
        ({"other": 1}, "the model takes ids, by, rest: give each of them once, not ids, by, rest, other"),
        (
            {"ids": IDS[:1]},
            r"does not run on inputs of shape \(1,\), \(8,\): AssertionError: Guard failed: [^\n]*== 2; sizes",
        ),
        ({"ids": IDS + 1}, r"does not run on inputs of shape \(2,\), \(8,\): IndexError: index out of range"),
        ({"by": (3.0,)}, r"the model does not run on inputs of shape .*: AssertionError: Guard failed: by\[0\] == 2"),
    ],
)
def test_batches_that_a_model_does_not_take(model, change, text):
    with pytest.raises(MXError, match=text):
        call(model, BATCH | change)


def test_several_batches():
    assert list(several(iter([IDS]))) == [IDS]
    for one in (IDS, {"ids": IDS}, UserDict(ids=IDS), None, 3, "folder"):
        with pytest.raises(MXError, match=f"seen is one of type {type(one).__name__}: give a list of batches"):
            several(one, "seen")


def test_batches_without_values(model):
    check_values((torch.ones(0), torch.ones(1)))  # a cache that is empty
    check_values(3)
    for batch in (torch.ones(0, 4), {"a": torch.ones(0), "b": 1}):
        with pytest.raises(MXError, match="the inputs of a batch are without values: there is nothing to compare"):
            check_values(batch)
    assert math.prod(leaves_of(model, BATCH)[0].shape) == 2
