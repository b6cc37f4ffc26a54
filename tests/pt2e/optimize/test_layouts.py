import pytest
import torch
from torch import nn

from pt2mx.pt2e.optimize.layouts import product_of

CASES = {
    "linear": (nn.Linear(12, 5), (2, 3, 12)),
    "conv1d": (nn.Conv1d(6, 8, 3, stride=2, padding=1, groups=2), (2, 6, 11)),
    "conv1d unbatched": (nn.Conv1d(6, 8, 3), (6, 11)),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 4, 9, 8)),
    "conv2d same": (nn.Conv2d(4, 6, (3, 5), padding="same"), (2, 4, 9, 8)),
    "conv2d valid": (nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 9, 8)),
    "conv2d depthwise": (nn.Conv2d(4, 4, 3, groups=4), (2, 4, 9, 8)),
    "conv3d": (nn.Conv3d(2, 3, 2, padding=1), (1, 2, 4, 5, 3)),
}


class Product(nn.Module):
    def __init__(self, function, *shape):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.function(x, self.weight)


CASES |= {
    "mm": (Product(torch.mm, 12, 5), (7, 12)),
    "matmul": (Product(torch.matmul, 12, 5), (2, 7, 12)),
    "matmul by a vector": (Product(torch.matmul, 12), (2, 7, 12)),
    "matmul of a vector": (Product(torch.matmul, 12, 5), (12,)),
    "addmm": (Product(lambda x, w: torch.addmm(torch.zeros(5), x, w), 12, 5), (7, 12)),
    "bmm": (Product(torch.bmm, 3, 12, 5), (3, 7, 12)),
    "matmul by one matrix": (Product(torch.matmul, 1, 12, 5), (3, 7, 12)),
    "matmul of many axes": (Product(torch.matmul, 2, 3, 12, 5), (2, 3, 7, 12)),
    "no rows": (Product(torch.bmm, 3, 12, 5), (3, 0, 12)),
}


def product(module, x):
    graph = torch.export.export(module.eval(), (x,)).module().graph
    for node in graph.nodes:
        for weight in node.all_input_nodes:
            if weight.op == "get_attr" and str(weight.target).endswith("weight"):
                return node, product_of(node, weight)
    raise AssertionError


@pytest.mark.parametrize("case", CASES)
def test_rows_times_matrices_are_the_product(case):
    module, shape = CASES[case]
    x = torch.randn(shape)
    _, found = product(module, x)
    layout, weight = found.layout, module.weight.detach()
    matrices, rows = layout.to_matrices(weight), layout.rows(x)
    assert torch.equal(layout.from_matrices(matrices, weight.shape), weight)
    got = rows @ matrices.mT  # (groups, rows, N)
    with torch.no_grad():
        if isinstance(getattr(module, "bias", None), torch.Tensor):
            module.bias.zero_()
        want = module(x)
    if case.startswith("conv"):
        channels = 0 if case.endswith("unbatched") else 1
        want = want.movedim(channels, -1).reshape(-1, len(matrices), matrices.shape[1]).transpose(0, 1)
    torch.testing.assert_close(got, want.reshape(got.shape), rtol=1e-4, atol=1e-4)
    assert matrices.shape[2] % weight.shape[layout.axis] == 0


def test_of_many_windows_those_are_copied_that_an_observer_takes():
    x = torch.randn(3, 4, 120, 60)
    _, found = product(nn.Conv2d(4, 6, (3, 2), groups=2, padding=1), x)
    rows = found.layout.rows(x)
    windows = nn.functional.unfold(x, (3, 2), padding=1).unflatten(1, (2, 2, 6))  # (B, groups, channels, taps, windows)
    every = windows.permute(1, 0, 4, 3, 2).reshape(2, -1, 12)
    assert rows.shape == (2, 8192, 12) and every.shape[1] > 8192
    assert torch.equal(rows, every[:, (torch.arange(8192) * (every.shape[1] / 8192)).long()])


def test_what_is_no_product_of_the_table():
    embedding = nn.Embedding(10, 8)
    graph = torch.export.export(embedding, (torch.tensor([1]),)).module().graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
    assert product_of(node, node.args[0]) is None
    _, found = product(nn.ConvTranspose1d(4, 4, 3), torch.randn(1, 4, 9))
    assert found is None
    _, found = product(Product(lambda x, w: w @ x, 5, 12), torch.randn(12, 3))  # the weight comes first
    assert found is None
    _, found = product(Product(torch.matmul, 3, 12, 5), torch.randn(7, 12))  # one x for all
    assert found is None
    _, found = product(Product(torch.matmul, 3, 12, 5), torch.randn(1, 7, 12))
    assert found is None
    _, found = product(Product(torch.matmul, 1, 3, 12, 5), torch.randn(2, 3, 7, 12))  # each matrix for two
    assert found is None
    _, found = product(Product(nn.functional.linear, 12), torch.randn(7, 12))
    assert found is None
