import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.fx.passes.merge_linears import merge_linears
from pt2mx.ops import linear
from pt2mx.ops.cache import store_mx

aten = torch.ops.aten


class Packed(nn.Module):
    """Multiply x with random packed weights, and apply `after` to x and the results."""

    def __init__(self, after, sizes=(24, 8, 40), element="fp8_e4m3", biases=False, block_size=32):
        super().__init__()
        self.after, self.element, self.block_size = after, element, block_size
        for i, n in enumerate(sizes):
            scale, data = pt2mx.quantize_mx(torch.randn(n, 70), element, block_size)
            self.register_buffer(f"data{i}", data)
            self.register_buffer(f"scale{i}", scale)
            setattr(self, f"bias{i}", nn.Parameter(torch.randn(n), False) if biases else None)

    def matmul(self, x, i):
        tensors = (getattr(self, f"{name}{i}") for name in ("data", "scale", "bias"))
        return linear.linear_mx(x, *tensors, self.element, self.block_size, 0)

    def forward(self, x):
        return self.after(x, *(self.matmul(x, i) for i in range(3)))


X = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(0))


def joined(module):
    """-> the graph after the pass, its `linear_mx`."""
    model = torch.export.export(module, (X,)).module()
    want = model(X)
    assert merge_linears(model) is model
    torch.testing.assert_close(model(X), want)
    return model, model.graph.find_nodes(op="call_function", target=linear.linear_mx)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("element", ["fp4_e2m1", "fp6_e3m2", "int8"])
def test_matmuls_of_one_input_are_one(element, biases):
    model, matmuls = joined(Packed(lambda x, q, k, v: (q.relu(), k.relu(), v.relu()), (32, 16, 48), element, biases))
    (matmul,) = matmuls
    assert matmul.meta["val"].shape == (2, 3, 96) and {"stack_trace", "nn_module_stack"} <= matmul.meta.keys()
    assert model.get_buffer(matmul.args[1].target).shape[0] == 96
    parts = list(matmul.users)
    assert [(n.target, n.args[1:]) for n in parts] == [
        (aten.slice.Tensor, (-1, *ends)) for ends in ((0, 32), (32, 48), (48, 96))
    ]
    assert [n.meta["val"].shape[-1] for n in parts] == [32, 16, 48]
    assert (matmul.args[3] is None) == (not biases)


def heads(x):
    return x.view(2, 3, 2, -1).transpose(1, 2)


@pytest.mark.parametrize(
    "after",
    [
        lambda x, q, k, v: heads(q) @ heads(k).mT @ heads(v),
        lambda x, q, k, v: q.view(6, -1).view(-1) + k.view(-1) + v.transpose(0, 1).reshape(-1),
        lambda x, q, k, v: torch.nn.functional.silu(q) * k + v,
        lambda x, q, k, v: q.view_as(x.new_empty(6, 16)).exp() + k.view(6, 16) * v.contiguous().view(6, 16),
        lambda x, q, k, v: (q[:, 0].relu(), k.split(4, -1)[1].exp(), v.flatten(1).sum(), v.unsqueeze(0).view(-1).cos()),
    ],
)
def test_views_of_a_part(after):
    _, matmuls = joined(Packed(after, (16, 16, 16)))
    assert len(matmuls) == 1


def test_keys_and_values_that_are_stored_as_codes():
    def after(x, q, k, v):
        cache = [torch.zeros(2, 1, 8, n, dtype=torch.uint8) for n in (16, 1, 16, 1)]
        keys, values = (y.view(2, 3, 1, 16).transpose(1, 2) for y in (k, v))
        store_mx(keys, values, *cache, torch.arange(3), "int8", 32, "floor", "even")
        return q.exp(), *cache

    _, matmuls = joined(Packed(after, (16, 16, 16)))
    assert len(matmuls) == 1


@torch.library.custom_op("pt2mx_tests::flat_cos", mutates_args=())
def flat_cos(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).cos()


flat_cos.register_fake(lambda x: x.new_empty(x.numel()))


def written(x, q, k, v):
    k.add_(1)
    return q + k, v.cos()


@pytest.mark.parametrize(
    ("after", "left"),
    [
        (lambda x, q, k, v: (q, k.exp(), v.exp()), 2),  # q leaves the graph
        (lambda x, q, k, v: (q.view(2, 48), k.exp(), v.exp()), 2),
        (lambda x, q, k, v: (q.view(torch.int32).sum(), k.exp(), v.exp()), 2),
        (lambda x, q, k, v: (q.as_strided((4,), (1,)).exp(), k.exp(), v.exp()), 2),
        (written, 2),
        (lambda x, q, k, v: (nn.functional.dropout(q, 0.1, False).view(-1).exp(), k.exp(), v.exp()), 2),
        (lambda x, q, k, v: (q.type_as(x), k.exp(), v.exp()), 2),
        (lambda x, q, k, v: (torch.atleast_2d(q).view(-1).exp(), k.exp(), v.exp()), 2),
        (lambda x, q, k, v: (torch.einsum("bsn->bsn", q).view(-1).exp(), k.exp(), v.exp()), 2),
        (lambda x, q, k, v: (flat_cos(q), k.exp(), v.exp()), 2),
    ],
)
def test_what_else_depends_on_the_memory_stays(after, left):
    assert len(joined(Packed(after, (16, 16, 16)))[1]) == left


def test_other_inputs_formats_and_shared_weights_stay():
    class Others(Packed):
        def forward(self, x):
            other = linear.linear_mx(x, self.data1, self.scale1, None, self.element, 32, 0)
            twice = linear.linear_mx(x.exp(), self.data0, self.scale0, None, self.element, 32, 0)
            return self.matmul(x, 0).exp(), other.exp(), self.matmul(x.exp(), 1).exp(), twice.exp()

    _, matmuls = joined(Others(None, (16, 16, 16)))
    assert len(matmuls) == 4

    class Formats(Packed):
        def forward(self, x):
            a = linear.linear_mx(x, self.data0, self.scale0, None, "fp8_e4m3", 32, 0)
            b = linear.linear_mx(x, self.data1, self.scale1, None, "int8", 32, 0)
            return a.exp(), b.exp()

    assert len(joined(Formats(None))[1]) == 2


def test_weights_of_whole_tiles_are_joined_with_such_alone():
    _, matmuls = joined(Packed(lambda x, q, k, v: (q.exp(), k.exp(), v.exp()), (32, 10, 16)))
    assert sorted(p.meta["val"].shape[-1] for p in matmuls) == [10, 48]


def test_biases_of_some_alone():
    class Some(Packed):
        def forward(self, x):
            return self.matmul(x, 0).exp(), self.matmul(x, 1).exp(), self.matmul(x, 2).exp()

    module = Some(None, biases=True)
    module.bias1 = None
    _, matmuls = joined(module)
    assert sorted(p.args[3] is None for p in matmuls) == [False, True]
