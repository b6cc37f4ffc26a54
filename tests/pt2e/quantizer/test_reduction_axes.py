import pytest
import torch
from torch.fx import Graph

from pt2mx.pt2e.quantizer.reduction_axes import einsum_axes, tensordot_axes, vecdot_axes

aten = torch.ops.aten


def call(target, *args, **kwargs):
    """A call whose tensors are "x" and "y"."""
    graph = Graph()
    tensors = {name: graph.placeholder(name) for name in "xyz"}
    args = [[tensors[t] for t in a] if isinstance(a, tuple) else a for a in args]
    return graph.call_function(target, tuple(args), kwargs)


@pytest.mark.parametrize(
    ("equation", "axes"),
    [
        ("ij,jk->ik", (1, 0)),
        ("bij, bkj -> bik", (2, 2)),
        ("ij,jk", (1, 0)),  # shared labels are reduced
        ("bqhd,hdo->bqo", (3, 1)),  # of h and d the last
        ("bhqd,dho->bqo", (3, 0)),
        ("...ij,...jk->...ik", (-1, -2)),
        ("j...i,j...->i...", (0, 0)),
        ("aB,bB->ab", (1, 1)),
        ("ijk,jl->l", (1, 0)),  # i and k are summed in one factor alone
        ("ij,kl->ijkl", None),
        ("ij,ij->ij", None),
        ("ii,ij->j", None),
        ("ij,jj->i", None),
    ],
)
def test_einsum(equation, axes):
    assert einsum_axes(call(aten.einsum.default, equation, ("x", "y"))) == axes


@pytest.mark.parametrize(("equation", "tensors"), [("ij->i", ("x",)), ("ij,jk,kl->il", ("x", "y", "z"))])
def test_einsum_of_another_number_of_tensors(equation, tensors):
    assert einsum_axes(call(aten.einsum.default, equation, tensors)) is None


def test_tensordot():
    assert tensordot_axes(call(aten.tensordot.default, ("x",), ("y",), [1, 2], [0, 3])) == (2, 3)
    assert tensordot_axes(call(aten.tensordot.default, ("x",), ("y",), [], [])) is None


def test_vecdot():
    assert vecdot_axes(call(aten.linalg_vecdot.default, ("x",), ("y",))) == (-1, -1)
    assert vecdot_axes(call(aten.linalg_vecdot.default, ("x",), ("y",), dim=0)) == (0, 0)
