from collections import namedtuple

import pytest
import torch
from torch.export import Dim

from pt2mx.pt2e.cli.inputs import signature_from_factory

X, Y = torch.zeros(4, 6), torch.zeros(4)
BATCH = Dim("batch", min=2, max=8)
ANY, ONE = (0, None), (4, 4)


def forward(x, y, *rest, k=None):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("shapes", "x", "y"),
    [
        (None, [ONE, (6, 6)], [ONE]),
        (({0: BATCH}, None), [(2, 8), (6, 6)], [ONE]),
        ({"x": {0: BATCH, 1: None}, "y": (BATCH,)}, [(2, 8), (6, 6)], [(2, 8)]),
        ([{0: Dim.AUTO, 1: Dim.STATIC}, [Dim.DYNAMIC]], [ANY, (6, 6)], [ANY]),
        (({0: 2 * BATCH, 1: Dim("free")}, None), [(4, 16), ANY], [ONE]),
        (({0: Dim.AUTO(max=9), 1: 6}, None), [(0, 9), (6, 6)], [ONE]),
        (torch.export.ShapesCollection(), [ANY, ANY], [ANY]),  # not read
        (({0: BATCH},), [ANY, ANY], [ANY]),  # export reports this error
        ({"x": 7, "y": "text"}, [ANY, ANY], [ANY]),
    ],
)
def test_ranges_of_tensors(shapes, x, y):
    signature = signature_from_factory(forward, (X, Y), {}, shapes)
    assert signature.ranges == [x, y] and signature.names == ["x", "y"] == signature.parameters


def test_trees_constants_and_numbers():
    Pair = namedtuple("Pair", ["left", "right"])
    args = ({"a": X, "b": [Y, 3]}, Pair(Y, True), X, 2)
    shapes = {"x": {"a": {1: Dim.AUTO}, "b": [None, Dim.DYNAMIC]}, "y": None, "rest": None, "k": {0: Dim.AUTO}}
    signature = signature_from_factory(forward, args, {"k": Y}, shapes)
    assert signature.parameters == ["x", "y", "rest_0", "rest_1"]
    assert signature.names == ["x_a", "x_b_0", "x_b_1", "y_left", "y_right", "rest_0", "rest_1", "k"]
    (number,) = signature.ranges[2]
    assert number[0] < -(10**9) and number[1] is None
    assert signature.ranges[:2] == [[ONE, ANY], [ONE]]
    assert signature.ranges[3:] == [[ONE], None, [ONE, (6, 6)], None, [ANY]]
