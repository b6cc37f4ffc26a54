import pytest
import torch
from torch.utils import _pytree as pytree

import pt2mx
from pt2mx import ops
from pt2mx.fx.passes.fuse_qdq import merge_fake_quantize
from tests.models import module_of

aten = torch.ops.aten
X = torch.randn(2, 3, 192)


def heads(x, size=32):
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def quantized(x, element="fp8_e4m3", block_size=32, axis=-1, **modes):
    return pt2mx.fake_quantize_mx(x, element, block_size, axis, **modes)


def matmul(x):
    return x @ x.mT


def attention(x):
    q, k, v = x[..., :64], x[..., 64:128], x[..., 128:]
    return quantized(heads(q)) @ quantized(heads(k)).mT, quantized(heads(v), axis=-2)


def columns_as_rows(x):
    x = x.repeat(1, 32, 1)
    return [matmul(quantized(x[..., i : i + 64].transpose(1, 2))) for i in (0, 64)]


@torch.library.custom_op("pt2mx_tests::reads_memory", mutates_args=())
def reads_memory(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@reads_memory.register_fake
def _(x):
    return torch.empty_like(x)


#: function of a (2, 3, 192) tensor -> the number of quantizations before and after
CASES = {
    "queries and keys": (attention, 3, 2),
    "three parts": (
        lambda x: [matmul(quantized(p)) for p in x.split(64, -1)],
        3,
        3,
    ),  # the graph states no bounds of them
    "three slices": (lambda x: [matmul(quantized(x[..., i : i + 64])) for i in (64, 0, 128)], 3, 1),
    "two and one": (lambda x: [matmul(quantized(x[..., i : i + 32])) for i in (0, 32, 96)], 3, 2),
    "permuted": (lambda x: [matmul(quantized(x[..., i : i + 64].permute(1, 0, 2))) for i in (0, 64)], 2, 1),
    "another shape": (
        lambda x: [matmul(quantized(heads(x[..., i : i + 64])).reshape(-1, 3, 64)) for i in (0, 64)],
        2,
        1,
    ),
    "another element": (
        lambda x: [matmul(quantized(x[..., :64])), matmul(quantized(x[..., 64:128], "int8"))],
        2,
        2,
    ),
    "another mode": (
        lambda x: [matmul(quantized(x[..., :64])), matmul(quantized(x[..., 64:128], scale_mode="ceil"))],
        2,
        2,
    ),
    "blocks of two heads": (
        lambda x: [matmul(quantized(heads(x[..., i : i + 64], 16), block_size=64)) for i in (0, 64)],
        2,
        2,
    ),
    "heads of half a block": (lambda x: [matmul(quantized(heads(x[..., i : i + 64], 16))) for i in (0, 64)], 2, 2),
    "blocks that start in between": (lambda x: [matmul(quantized(x[..., i : i + 32])) for i in (16, 48)], 2, 2),
    "along another dimension": (lambda x: [matmul(quantized(x[..., i : i + 64], axis=1)) for i in (0, 64)], 2, 2),
    "the last dimension moved": (columns_as_rows, 2, 2),
    "a part that something else reads": (
        lambda x: [(p := x[..., :64]) + 1, matmul(quantized(p)), matmul(quantized(x[..., 64:]))],
        2,
        2,
    ),
    "every second value": (lambda x: [matmul(quantized(x[..., i : i + 64 : 2])) for i in (0, 64)], 2, 2),
    "stochastic": (
        lambda x: [matmul(quantized(x[..., i : i + 64], rounding="stochastic", seed=1)) for i in (0, 64)],
        2,
        2,
    ),
    "an operator that goes by strides": (lambda x: [torch.relu(quantized(x[..., i : i + 64])) for i in (0, 64)], 2, 2),
    "no values": (lambda x: [matmul(quantized(x[..., 32:64])), matmul(quantized(x[..., 64:32]))], 2, 2),
    "to the end": (lambda x: [matmul(quantized(p)) for p in (x[..., :64], x[..., 64:])], 2, 1),
    "a result": (lambda x: [quantized(x[..., i : i + 64]) for i in (0, 64)], 2, 2),
    "a reader of memory": (lambda x: [reads_memory(quantized(x[..., i : i + 64])) for i in (0, 64)], 2, 2),
}


def between(after):
    return module_of(lambda self, x: pytree.tree_map(torch.neg, after(x * 2)))


@pytest.mark.compiled_cases(
    "three slices",
    "two and one",
    "another shape",
    "along another dimension",
    "every second value",
    "to the end",
    "a result",
)
@pytest.mark.parametrize("name", CASES)
def test_before_and_after(name):
    after, before, left = CASES[name]
    model = torch.export.export(between(after), (X,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    want = model(X)
    assert len(model.graph.find_nodes(op="call_function", target=ops.fake_quantize_mx)) == before
    assert merge_fake_quantize(model) is model
    assert len(model.graph.find_nodes(op="call_function", target=ops.fake_quantize_mx)) == left
    model.graph.lint()
    got = model(X)
    assert all(map(torch.equal, pytree.tree_leaves(got), pytree.tree_leaves(want)))
    torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))


def test_values_are_told_as_they_are():
    model = torch.export.export(between(attention), (X,)).module()
    merge_fake_quantize(model)

    class Compare(torch.fx.Interpreter):
        def run_node(self, node):
            value = super().run_node(node)
            if isinstance(value, torch.Tensor) and "val" in node.meta:
                told = node.meta["val"]
                assert (value.shape, value.stride(), value.dtype) == (told.shape, told.stride(), told.dtype)
            return value

    Compare(model).run(X)
