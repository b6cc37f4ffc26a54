import pytest
import torch
from torch import nn

from pt2mx.pt2e.optimize.matmul_views import columns_are_last, matmul_of, same_matrices, without_padding
from pt2mx.pt2e.optimize.observers import sample
from tests.models import module_of

aten = torch.ops.aten

CASES = {
    "linear": (nn.Linear(12, 5), (2, 3, 12)),
    "conv1d": (nn.Conv1d(6, 8, 3, stride=2, padding=1, groups=2), (2, 6, 11)),
    "conv1d unbatched": (nn.Conv1d(6, 8, 3), (6, 11)),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 4, 9, 8)),
    "conv2d same": (nn.Conv2d(4, 6, (3, 5), padding="same"), (2, 4, 9, 8)),
    "conv2d valid": (nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 9, 8)),
    "conv2d depthwise": (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 9, 8)),
    "conv3d": (nn.Conv3d(2, 3, 2, padding=1), (1, 2, 4, 5, 3)),
    "conv transposed 1d": (nn.ConvTranspose1d(6, 4, 3, stride=2, padding=1, output_padding=1), (2, 6, 11)),
    "conv transposed unbatched": (nn.ConvTranspose1d(6, 4, 3), (6, 11)),
    "conv transposed 2d": (
        nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), output_padding=(0, 2), dilation=(2, 1)),
        (2, 4, 5, 7),
    ),
    "conv transposed with much padding": (nn.ConvTranspose1d(6, 4, 2, padding=3), (2, 6, 11)),
}


def by_weight(function, *shape):
    return module_of(lambda self, *x: function(*x, self.weight), weight=nn.Parameter(torch.randn(shape)))


def einsum(equation, *shape):
    return by_weight(lambda x, w: torch.einsum(equation, x, w), *shape)


CASES |= {
    "mm": (by_weight(torch.mm, 12, 5), (7, 12)),
    "matmul": (by_weight(torch.matmul, 12, 5), (2, 7, 12)),
    "matmul by a vector": (by_weight(torch.matmul, 12), (2, 7, 12)),
    "matmul of a vector": (by_weight(torch.matmul, 12, 5), (12,)),
    "mv": (by_weight(torch.mv, 12), (7, 12)),
    "dot": (by_weight(torch.dot, 12), (12,)),
    "inner": (by_weight(torch.inner, 5, 12), (2, 7, 12)),
    "linear by a vector": (by_weight(nn.functional.linear, 12), (7, 12)),
    "addmm": (by_weight(lambda x, w: torch.addmm(torch.zeros(5), x, w), 12, 5), (7, 12)),
    "addmv": (by_weight(lambda x, w: torch.addmv(torch.zeros(7), x, w), 12), (7, 12)),
    "bmm": (by_weight(torch.bmm, 3, 12, 5), (3, 7, 12)),
    "baddbmm": (by_weight(lambda x, w: torch.baddbmm(torch.zeros(5), x, w), 3, 12, 5), (3, 7, 12)),
    "addbmm": (by_weight(lambda x, w: torch.addbmm(torch.zeros(5), x, w), 3, 12, 5), (3, 7, 12)),
    "matmul by one matrix": (by_weight(torch.matmul, 1, 12, 5), (3, 7, 12)),
    "matmul of many axes": (by_weight(torch.matmul, 2, 3, 12, 5), (2, 3, 7, 12)),
    "tensordot": (by_weight(lambda x, w: torch.tensordot(x, w, 2), 4, 12, 5), (7, 4, 12)),
    "no rows": (by_weight(torch.bmm, 3, 12, 5), (3, 0, 12)),
    "einsum": (einsum("bsk,kn->bsn", 12, 5), (2, 7, 12)),
    "einsum of heads": (einsum("...hk,hkn->...hn", 3, 12, 5), (2, 7, 3, 12), (2, 0, 1, 3)),
    "einsum of two labels": (einsum("bshk,hkn", 3, 12, 5), (2, 7, 3, 12), (0, 2, 1)),
    # (groups, rows, N) from dimensions in another order
    "weight on the left": (by_weight(lambda x, w: w @ x, 5, 12), (12, 7), (1, 0)),
    "matmul by a weight on the left": (by_weight(lambda x, w: w @ x, 5, 12), (3, 12, 7), (0, 2, 1)),
    "mm by a weight on the left": (by_weight(lambda x, w: torch.mm(w, x), 5, 12), (12, 7), (1, 0)),
    "vector on the left": (by_weight(lambda x, w: w @ x, 12), (2, 12, 7)),
    "bmm by weights on the left": (by_weight(lambda x, w: torch.bmm(w, x), 3, 5, 12), (3, 12, 7), (0, 2, 1)),
    "mv of a weight": (by_weight(lambda x, w: torch.mv(w, x), 5, 12), (12,)),
    "one x for all matrices": (by_weight(torch.matmul, 3, 12, 5), (7, 12), (1, 0, 2)),
    "one x for some matrices": (by_weight(torch.matmul, 2, 3, 12, 5), (2, 1, 7, 12), (0, 2, 1, 3)),
    "one matrix for some x": (by_weight(torch.matmul, 1, 3, 12, 5), (2, 3, 7, 12), (1, 0, 2, 3)),
}


def matmul(module, x):
    graph = torch.export.export(module.eval(), (x,)).module().graph
    for node in graph.nodes:
        for weight in node.all_input_nodes:
            if weight.op == "get_attr" and str(weight.target).endswith("weight"):
                return node, matmul_of(node, weight)
    raise AssertionError


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_rows_times_matrices_equal_the_matmul(case):
    module, shape, *order = CASES[case]
    x = torch.randn(shape)
    _, actual = matmul(module, x)
    view, weight = actual.view, module.weight.detach()
    matrices, rows = view.to_matrices(weight), view.rows(x)
    assert torch.equal(view.from_matrices(matrices, weight.shape), weight)
    got = rows @ matrices.mT  # (groups, rows, N)
    with torch.no_grad():
        if isinstance(getattr(module, "bias", None), torch.Tensor):
            module.bias.zero_()
        want = module(x)
    if case.startswith("conv"):
        channels = 0 if case.endswith("unbatched") else 1
        want = want.movedim(channels, -1).reshape(-1, len(matrices), matrices.shape[1]).transpose(0, 1)
    want = want.permute(*order) if order else want
    close(got, want.reshape(got.shape))
    assert matrices.shape[2] % weight.shape[view.axis] == 0
    line = matrices[0, 0].reshape(-1, weight.shape[view.axis])[-1]  # runs along the axis
    assert any(torch.equal(line, values) for values in weight.movedim(view.axis, -1).reshape(-1, len(line)))
    assert columns_are_last(actual) == (view.columns_last and "einsum" not in case)
    assert view.columns_last == (rows.shape[2] == x.shape[-1] and torch.equal(rows[0, :1, :], last(x)[:1]))


def last(x):
    """Return (..., K) as rows."""
    return x.reshape(-1, x.shape[-1])


def test_of_many_windows_those_are_copied_that_an_observer_takes():
    x = torch.randn(3, 4, 120, 60)
    _, actual = matmul(nn.Conv2d(4, 6, (3, 2), groups=2, padding=1), x)
    rows = actual.view.rows(x)
    windows = nn.functional.unfold(x, (3, 2), padding=1).unflatten(1, (2, 2, 6))  # (B, groups, channels, taps, windows)
    every = windows.permute(1, 0, 4, 3, 2).reshape(2, -1, 12)
    assert rows.shape == (2, 8192, 12) and every.shape[1] > 8192
    assert torch.equal(rows, every[:, sample(every.shape[1], x.device)])


def test_every_phase_of_a_transposed_convolution_is_sampled():
    x = torch.ones(2, 1, 64, 64)  # 128 x 128 outputs, twice 16,384, each reads one value
    _, actual = matmul(nn.ConvTranspose2d(1, 1, 2, stride=2), x)
    torch.testing.assert_close(actual.view.rows(x)[0].mean(0), torch.full((4,), 0.25), rtol=0.05, atol=0)


class Experts(nn.Module):
    """Multiply each row by the matrix of its expert: rows sorted by expert, or gathered matrices."""

    def __init__(self, left):
        super().__init__()
        self.left, self.weight = left, nn.Parameter(torch.randn(4, 5, 12) if left else torch.randn(4, 12, 5))

    def forward(self, x, ids):
        weight = self.weight[ids]
        return (weight @ x.unsqueeze(2)).squeeze(2) if self.left else (x.unsqueeze(1) @ weight).squeeze(1)


@pytest.mark.parametrize("left", [False, True])
def test_experts_that_are_gathered(left):
    module, x, ids = Experts(left), torch.randn(9, 12), torch.tensor([3, 0, 0, 1, 3, 3, 0, -4, 1])
    graph = torch.export.export(module, (x, ids)).module().graph
    (node,) = graph.find_nodes(op="call_function", target=aten.matmul.default)
    (weight,) = (n for n in graph.nodes if n.target == "weight")
    actual = matmul_of(node, weight)
    assert actual.view.experts and [n.name for n in actual.extra_inputs] == ["ids"]
    operand = x.unsqueeze(2) if left else x.unsqueeze(1)
    rows, matrices = actual.view.rows(operand, ids), actual.view.to_matrices(module.weight.detach())
    assert [tuple(group.shape) for group in rows] == [(1, 4, 12), (1, 2, 12), (1, 0, 12), (1, 3, 12)]
    want = module(x, ids).detach()
    for group, matrix, expert in zip(rows, matrices, range(4), strict=True):
        close(group[0] @ matrix.T, want[ids % 4 == expert])
    assert torch.equal(actual.view.from_matrices(matrices, module.weight.shape), module.weight)


def test_experts_that_a_mask_picks():
    graph = torch.export.export(Experts(False), (torch.randn(4, 12), torch.tensor([True] * 4))).module().graph
    (node,) = graph.find_nodes(op="call_function", target=aten.matmul.default)
    assert matmul_of(node, next(n for n in graph.nodes if n.target == "weight")) is None


def test_layouts_that_make_the_same_matrices():
    def view(module, shape):
        return matmul(module, torch.randn(shape))[1].view

    shape = torch.Size((3, 12, 5))
    batched, shared, both = (
        view(by_weight(torch.matmul, *shape), (3, 7, 12)),
        view(by_weight(torch.matmul, *shape), (7, 12)),
        view(by_weight(lambda x, w: torch.tensordot(x, w, 2), *shape), (7, 3, 12)),
    )
    assert same_matrices([batched, view(einsum("hbk,hkn->bhn", *shape), (3, 7, 12))], shape)
    assert not same_matrices([batched, shared], shape) and not same_matrices([shared, both], shape)
    turned = view(by_weight(lambda x, w: torch.tensordot(x, w, ((2, 1), (0, 1))), *shape), (7, 12, 3))
    assert same_matrices([both, turned], shape)
    conv = [view(nn.Conv1d(6, 8, 3, padding=padding), (2, 6, 11)) for padding in (0, 1)]
    assert same_matrices(conv, torch.Size((8, 6, 3)))


def test_experts_of_sorted_rows():
    module = by_weight(lambda x, ends, w: nn.functional.grouped_mm(x, w.mT, offs=ends), 4, 8, 16)
    module, x, ends = module.bfloat16(), torch.randn(11, 16).bfloat16(), torch.tensor([3, 3, 8, 10], dtype=torch.int32)
    graph = torch.export.export(module, (x, ends)).module().graph
    (node,) = graph.find_nodes(op="call_function", target=aten._grouped_mm.default)
    actual = matmul_of(node, node.args[1])
    assert actual.view.experts and columns_are_last(actual) and actual.extra_inputs == (node.args[2],)
    rows, transposed = actual.view.rows(x, ends), module.weight.detach().mT
    assert [group.shape[1] for group in rows] == [3, 0, 5, 2]  # the eleventh row belongs to no expert
    matrices = actual.view.to_matrices(transposed)
    got = torch.cat([group[0] @ matrix.T for group, matrix in zip(rows, matrices, strict=True)])
    torch.testing.assert_close(got, module(x, ends).detach()[:10])
    assert torch.equal(actual.view.from_matrices(matrices, transposed.shape), transposed)
    assert actual.view.axis == 1


def test_rows_of_padding_are_left_out():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
            self.other, self.conv = nn.Linear(3, 5), nn.Conv1d(3, 3, 1)

        def forward(self, x, mask):  # (B, S, 12), (B, S)
            y = self.second(self.first(x).reshape(-1, 12))
            return y * mask.reshape(-1, 1), self.other(x.transpose(1, 2).reshape(-1, 3)), self.conv(x)

    x, mask = torch.randn(2, 3, 12), torch.tensor([[1, 1, 0], [1, 0, 0]])
    dims = {0: torch.export.Dim("batch")}
    graph = torch.export.export(Masked(), (x, mask), dynamic_shapes=(dims, dims)).module().graph
    (arguments,) = (node for node in graph.nodes if node.name == "mask")
    kept = []
    for node in graph.nodes:
        weights = [n for n in node.all_input_nodes if str(n.target).endswith("weight")]
        if weights:
            actual = matmul_of(node, weights[0])
            kept.append(without_padding(actual, arguments))
            assert (kept[-1] is actual) == (len(kept) > 2)
    assert all(matmul.extra_inputs == (arguments,) for matmul in kept[:2])
    want = x[mask.bool()].unsqueeze(0)
    assert torch.equal(kept[0].view.rows(x, mask), want)
    assert torch.equal(kept[1].view.rows(x.reshape(-1, 12), mask.bool()), want)
    assert kept[0].view.rows == without_padding(kept[0], arguments).view.rows  # one observer for all users of x


def test_operators_outside_the_table():
    embedding = nn.Embedding(10, 8)
    graph = torch.export.export(embedding, (torch.tensor([1]),)).module().graph
    (node,) = graph.find_nodes(op="call_function", target=aten.embedding.default)
    assert matmul_of(node, node.args[0]) is None
    for module, shape in (
        (nn.ConvTranspose1d(4, 4, 3, groups=2), (1, 4, 9)),  # blocks run across the groups
        (einsum("bk,kn->n", 12, 5), (7, 12)),  # the sum of the rows
        (by_weight(lambda x, w: torch.einsum("bk,kn,n->bn", x, w, torch.ones(5)), 12, 5), (7, 12)),
        (einsum("hk,hkn->hn", 3, 12, 5), (1, 12)),  # a dimension that is broadcast within a label
        (by_weight(torch.linalg.vecdot, 12), (7, 12)),
        (by_weight(torch.mul, 12), (7, 12)),
    ):
        assert matmul(module, torch.randn(shape))[1] is None
