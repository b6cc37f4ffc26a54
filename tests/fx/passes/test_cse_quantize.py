import pytest
import torch

from pt2mx import MXSpec, fake_quantize_mx, ops
from pt2mx.fx.graph.qdq import insert_quantize_dequantize
from pt2mx.fx.passes.cse_quantize import cse_quantize
from pt2mx.fx.passes.fuse_qdq import fuse_qdq
from tests.graph import count


class Readers(torch.nn.Module):
    def forward(self, x):
        return x * 2, x * 3, x * 5


class Written(torch.nn.Module):
    def forward(self, x):
        y = x.clone()
        first = y * 2
        y.add_(1)
        return first, y * 3


def quantized(model, *specs):
    """Each multiplication reads a pair of its own."""
    exported = torch.export.export(model, (torch.randn(3, 64),)).module()
    products = exported.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    for mul, spec in zip(products, specs, strict=True):
        x = mul.args[0]
        with exported.graph.inserting_before(mul):
            alias = exported.graph.call_function(torch.ops.aten.clone.default, (x,))  # just before its reader
        alias.meta.update(x.meta)
        mul.replace_input_with(x, insert_quantize_dequantize(alias, spec))
        alias.replace_all_uses_with(x)
        exported.graph.erase_node(alias)
    exported.recompile()
    return exported


def test_equal_ones_are_done_once():
    model = quantized(Readers(), MXSpec("fp8_e4m3"), MXSpec("fp4_e2m1"), MXSpec("fp8_e4m3"))
    x = torch.randn(3, 64)
    want = model(x)
    assert (count(model, ops.quantize_mx), count(model, ops.dequantize_mx)) == (3, 3)
    assert cse_quantize(model) is model
    assert (count(model, ops.quantize_mx), count(model, ops.dequantize_mx)) == (2, 2)
    assert all(torch.equal(a, b) for a, b in zip(model(x), want, strict=True))


def test_fused_ones_are_shared_too():
    model = cse_quantize(fuse_qdq(quantized(Readers(), *[MXSpec("int8")] * 3)))
    assert count(model, ops.fake_quantize_mx) == 1
    x = torch.randn(3, 64)
    assert all(torch.equal(y, fake_quantize_mx(x, "int8") * n) for y, n in zip(model(x), (2, 3, 5), strict=True))


@pytest.mark.parametrize(("seed", "kept"), [(None, 3), (7, 1)])
def test_stochastic_ones_stay_apart_without_a_seed(seed, kept):
    model = quantized(Readers(), *[MXSpec("fp4_e2m1", rounding="stochastic")] * 3)
    for node in model.graph.find_nodes(op="call_function", target=ops.quantize_mx):
        node.args = (*node.args[:-1], seed)
    model.recompile()
    x = torch.randn(3, 64)
    torch.manual_seed(1)
    want = model(x)
    cse_quantize(model)
    assert count(model, ops.quantize_mx) == kept
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(model(x), want, strict=True))


def test_what_is_written_in_between_stays_apart():
    model = quantized(Written(), MXSpec("fp8_e4m3"), MXSpec("fp8_e4m3"))
    x = torch.randn(3, 64)
    want = model(x)
    cse_quantize(model)
    assert count(model, ops.quantize_mx) == 2
    assert all(torch.equal(a, b) for a, b in zip(model(x), want, strict=True))
    assert torch.equal(want[1], fake_quantize_mx(x + 1, "mxfp8") * 3)


def test_a_result_that_is_written_stays_apart():
    class Results(torch.nn.Module):
        def forward(self, x):
            first, second = (
                ops.fake_quantize_mx(x, "fp8_e4m3", 32, -1, "floor", "even", None, "identity") for _ in range(2)
            )
            return first.add_(1), second

    x = torch.randn(3, 64)
    model = cse_quantize(torch.export.export(Results(), (x,)).module())
    first, second = model(x)
    assert torch.equal(second, fake_quantize_mx(x, "mxfp8")) and torch.equal(first, second + 1)


def test_two_names_of_one_weight_are_one():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("a", "b"):
                self.register_buffer(f"{name}_data", torch.randint(120, (8, 64), dtype=torch.uint8))
                self.register_buffer(f"{name}_scale", torch.full((8, 2), 127, dtype=torch.uint8))

        def forward(self):
            return [ops.dequantize_mx(getattr(self, f"{n}_data"), getattr(self, f"{n}_scale"), "fp8_e4m3", 32,
                                      torch.float32, -1) for n in ("a", "b")]  # fmt: skip

    model = torch.export.export(Tied(), ()).module()
    assert count(cse_quantize(model), ops.dequantize_mx) == 2
    model.b_data, model.b_scale = model.a_data, model.a_scale
    assert count(cse_quantize(model), ops.dequantize_mx) == 1
    first, second = model()
    assert torch.equal(first, second)
