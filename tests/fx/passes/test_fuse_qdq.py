import operator

import pytest
import torch

from pt2mx import FORMATS, MXSpec, fake_quantize_mx, ops
from pt2mx.fx.graph.qdq import insert_quantize_dequantize, spec_of_dequantize
from pt2mx.fx.passes.fuse_qdq import cse_quantize, fuse_qdq
from tests.graph import called, count
from tests.models import quantized_double

PAIR = [ops.quantize_mx, operator.getitem, operator.getitem, ops.dequantize_mx]


def targets(model):
    ours = (*PAIR, ops.fake_quantize_mx)
    return [target for target in called(model) if target in ours]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_pair_becomes_one_operator(name, dtype):
    spec = MXSpec(name, 16, -1, "rceil", "half_away")
    model, _ = quantized_double(spec, dtype)
    x = torch.randn(3, 70, dtype=dtype)
    want = model(x)
    assert targets(model) == PAIR
    assert fuse_qdq(model) is model
    assert targets(model) == [ops.fake_quantize_mx]
    assert torch.equal(model(x), want) and torch.equal(want, fake_quantize_mx(x, spec) * 2)


def test_place_and_value_are_those_of_the_pair():
    model, dequantize = quantized_double(MXSpec("fp6_e2m3"))
    place = {"stack_trace": "File here", "nn_module_stack": {"layer": ("layer", "torch.nn.Linear")}}
    dequantize.meta.update(place)
    value = dequantize.meta["val"]
    (fused,) = fuse_qdq(model).graph.find_nodes(op="call_function", target=ops.fake_quantize_mx)
    assert {key: fused.meta[key] for key in place} == place and fused.meta["val"] is value
    assert spec_of_dequantize(fused) == MXSpec("fp6_e2m3", axis=1)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp4_e2m1"])
def test_dynamic_lengths(name):
    model, _ = quantized_double(MXSpec(name, 32, -1), dynamic=True)
    assert targets(fuse_qdq(model)) == [ops.fake_quantize_mx]
    for shape in [(2, 2), (3, 71), (65, 33)]:
        x = torch.randn(shape)
        assert torch.equal(model(x), fake_quantize_mx(x, name) * 2)


@pytest.mark.parametrize("seed", [None, 11])
def test_stochastic_rounding_draws_the_same_numbers(seed):
    model, dequantize = quantized_double(MXSpec("fp4_e2m1", rounding="stochastic"))
    quantize = dequantize.args[0].args[0]
    quantize.args = (*quantize.args[:-1], seed)
    model.recompile()
    x = torch.randn(3, 70)
    torch.manual_seed(5)
    want = model(x)
    torch.manual_seed(5)
    assert torch.equal(fuse_qdq(model)(x), want)
    assert targets(model) == [ops.fake_quantize_mx]


def read_codes(model, quantize, dequantize):
    output = model.graph.output_node()
    output.args = ((*output.args[0], dequantize.args[0]),)


def another_dtype(model, quantize, dequantize):
    dequantize.update_arg(4, torch.bfloat16)
    dequantize.meta["val"] = dequantize.meta["val"].to(torch.bfloat16)


def another_axis(model, quantize, dequantize):
    dequantize.update_arg(5, 0)


def another_element(model, quantize, dequantize):
    dequantize.update_arg(2, "fp8_e5m2")


def swapped(model, quantize, dequantize):
    dequantize.args = (dequantize.args[1], dequantize.args[0], *dequantize.args[2:])


@pytest.mark.parametrize("change", [read_codes, another_dtype, another_axis, another_element, swapped])
def test_what_is_no_plain_pair_stays(change):
    model, dequantize = quantized_double(MXSpec("fp8_e4m3"))
    change(model, dequantize.args[0].args[0], dequantize)
    assert targets(fuse_qdq(model)) == PAIR


def test_it_quantizes_before_a_later_write():
    class Written(torch.nn.Module):
        def forward(self, x):
            y = x.clone()
            scale, data = ops.quantize_mx(y, "fp8_e4m3", 32, -1, "floor", "even")
            y.zero_()
            return ops.dequantize_mx(data, scale, "fp8_e4m3", 32, torch.float32, -1), y

    model, x = torch.export.export(Written(), (torch.randn(3, 64),)).module(), torch.randn(3, 64)
    assert targets(fuse_qdq(model)) == [ops.fake_quantize_mx]
    assert torch.equal(model(x)[0], fake_quantize_mx(x, "mxfp8"))


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
    """Each multiplication reads its own pair."""
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
