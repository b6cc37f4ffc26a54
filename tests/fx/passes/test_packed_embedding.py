import pytest
import torch
from torch import nn

from pt2mx import FORMATS, MXSpec, ops
from pt2mx.fx.graph.qdq import spec_of_dequantize
from pt2mx.fx.passes.packed_operands import use_packed_embeddings
from tests.flow import exported
from tests.packed_weight import Gather

aten = torch.ops.aten


IDS = torch.tensor([[3, 0, 3], [15, 7, 1]])


def lowered(gather, ids=IDS):
    model = exported(gather, ids)
    want = model(ids)
    assert use_packed_embeddings(model) is model
    assert all(torch.equal(a, b) for a, b in zip(_list(model(ids)), _list(want), strict=True))
    return model


def _list(x):
    return [x] if isinstance(x, torch.Tensor) else list(x)


def dequantizes(model):
    """Return the shapes of dequantized tensors."""
    return [tuple(n.meta["val"].shape) for n in model.graph.find_nodes(op="call_function", target=ops.dequantize_mx)]


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_gathered_first(name, dtype):
    model = lowered(Gather(lambda w, ids: nn.functional.embedding(ids, w, padding_idx=3), name, dtype=dtype))
    data, scale = model.graph.find_nodes(op="call_function", target=aten.embedding.default)
    assert [n.args[0].target for n in (data, scale)] == ["data", "scale"]
    assert [n.meta["val"].dtype for n in (data, scale)] == [torch.uint8] * 2
    assert scale.meta["val"].shape == (2, 3, 3) and dequantizes(model) == [(2, 3, 70)]
    (dequantize,) = model.graph.find_nodes(op="call_function", target=ops.dequantize_mx)
    assert spec_of_dequantize(dequantize) == MXSpec(name, axis=2)
    assert {"val", "nn_module_stack", "stack_trace"} <= dequantize.meta.keys() and dequantize.meta["val"].dtype == dtype


@pytest.mark.parametrize(
    ("read", "ids"),
    [
        (lambda w, ids: w[ids], IDS),
        (lambda w, ids: torch.index_select(w, 0, ids), IDS[0]),
    ],
)
def test_other_gathers(read, ids):
    model = lowered(Gather(read), ids)
    assert dequantizes(model) == [(*ids.shape, 70)]


@pytest.mark.parametrize(
    ("read", "ids", "axis"),
    [
        (lambda w, ids: nn.functional.embedding(ids, w), IDS, 0),  # blocks run across rows
        (lambda w, ids: torch.index_select(w, 1, ids), IDS[0], -1),
        (lambda w, ids: w[:, ids], IDS, -1),
        (lambda w, ids: w[ids, ids], IDS, -1),
        (lambda w, ids: nn.functional.embedding(ids, w.t()), IDS, -1),
    ],
)
def test_what_is_no_gather_of_rows_stays(read, ids, axis):
    assert dequantizes(lowered(Gather(read, axis=axis), ids)) == [(16, 70)]


def test_other_readers_keep_the_weight():
    model = lowered(Gather(lambda w, ids: (nn.functional.embedding(ids, w), w.sum())))
    assert sorted(dequantizes(model)) == [(2, 3, 70), (16, 70)]
    assert set(model.state_dict()) == {"data", "scale"}


def test_a_weight_that_is_renormalized_stays():
    model = lowered(Gather(lambda w, ids: nn.functional.embedding(ids, w, max_norm=0.5)))
    assert dequantizes(model) == [(16, 70)]


def test_codes_that_the_graph_writes_stay():
    class Written(Gather):
        def forward(self, ids):
            w = ops.dequantize_mx(self.data, self.scale, *self.modes)
            self.data.zero_()
            return nn.functional.embedding(ids, w)

    model = torch.export.export(Written(None), (IDS,)).module()
    want = model(IDS).clone()
    assert want.any() and dequantizes(use_packed_embeddings(model)) == [(16, 70)]
