"""Models with scales other than E8M0, and blocks of several rows, keep their values through folding and lowering."""

import pytest
import torch
from torch.nn import functional as F

import pt2mx
from pt2mx.fx.graph.constants import mark_constants
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.qdq import insert_quantize_dequantize, quantize_of
from pt2mx.fx.passes.fold_weights import fold_all_weights
from pt2mx.fx.passes.weight_layout import use_mma_layout
from tests.every_device import everywhere
from tests.float_scale_models import IDS, Net, quantized
from tests.flow import exported
from tests.graph import calls, namespaces
from tests.models import module_of

NAMES = ("nvfp4", "fp4_e2m1{16}(e4m3_f32_divisor)", "int4{32}(bf16)", "fp8_e4m3{16x32}(f32)", "fp8_e4m3{32x32}")
ops = torch.ops.pt2mx


@pytest.mark.compiled_except("fp8_e4m3{16x32}*")
@pytest.mark.slow_except("nvfp4-False", "fp8_e4m3{16x32}(f32)-False")
@pytest.mark.parametrize("unpack", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_lowered_models(name, unpack):
    torch.manual_seed(0)
    model = quantized(Net().eval(), IDS, name=name)
    with torch.no_grad():
        want = model(IDS)
        folded = fold_all_weights(model)
        assert all(map(torch.equal, folded(IDS), want))
        lowered = pt2mx.lower_to_inductor(folded, unpack=unpack)
        torch.testing.assert_close(lowered(IDS), want, rtol=1e-5, atol=1e-6)
        assert (len(calls(lowered, ops.linear_mx.default)) == 0) == unpack
        portable = pt2mx.make_portable(torch.export.export(lowered, (IDS,)))
        assert "pt2mx" not in namespaces(portable.graph_module)
        torch.testing.assert_close(portable.module()(IDS), want, rtol=1e-5, atol=1e-6)


def test_buffers_of_a_folded_weight():
    torch.manual_seed(0)
    net = Net().eval()
    folded = fold_all_weights(quantized(net, IDS))
    state, t = folded.state_dict(), pt2mx.tensor_scale_mx(net.a.weight, "nvfp4")
    scale, data = pt2mx.quantize_mx(net.a.weight, "nvfp4", tensor_scale=t)
    assert torch.equal(state["a.weight_tensor_scale"], t) and "a.weight" not in state
    assert torch.equal(state["a.weight_scale"], scale) and torch.equal(state["a.weight_data"], data)
    matmul = calls(pt2mx.lower_to_inductor(folded), ops.linear_mx.default)[0]
    assert matmul.args[4:10] == ("fp4_e2m1", 16, 0, None, "e4m3_f32", None)
    assert matmul.args[10].target == "a.weight_tensor_scale"


def test_weights_in_the_mma_layout():
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 48).bfloat16().eval()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for name, fits in (("nvfp4", True), ("fp4_e2m1{16}(e4m3_f32_divisor)", False), ("mxfp4", True)):
        spec, model = pt2mx.parse(name), exported(net, x)
        (node,) = calls(model, torch.ops.aten.linear.default)
        node.update_arg(1, insert_quantize_dequantize(node.args[1], spec, node))
        model.recompile()
        with torch.no_grad():
            want = model(x)
            lowered = pt2mx.lower_to_inductor(fold_all_weights(model))
            everywhere(use_mma_layout)(lowered)
            lowered.recompile()
            torch.testing.assert_close(lowered(x), want, rtol=0.02, atol=0.02)
        assert len(calls(lowered, ops.linear_mx_mma_layout.default)) == fits, name


def test_a_static_tensor_scale():
    """Both nodes of a pair read the one tensor scale; the quantization of another one is another."""
    model = exported(torch.nn.ReLU(), torch.ones(2, 32))
    x = next(iter(model.graph.nodes))
    model.register_buffer("t", torch.tensor(0.25))
    with model.graph.inserting_before(x):
        t = model.graph.get_attr("t")
    t.meta["val"] = torch.empty(())
    dequantize = insert_quantize_dequantize(x, pt2mx.parse("nvfp4"), tensor_scale=t)
    (relu,) = calls(model, torch.ops.aten.relu.default)
    relu.update_arg(0, dequantize)
    model.recompile()
    values = torch.randn(2, 32)
    want = pt2mx.fake_quantize_mx(values, "nvfp4", tensor_scale=torch.tensor(0.25)).relu()
    assert torch.equal(model(values), want) and not calls(model, ops.tensor_scale_mx.default)
    lowered = pt2mx.lower_to_inductor(model)
    assert torch.equal(lowered(values), want) and len(calls(lowered, ops.fake_quantize_mx.default)) == 1
    assert quantize_of(dequantize) is not None
    dequantize.update_arg(9, x)
    assert quantize_of(dequantize) is None


@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3{16x32}(f32)"])
def test_weights_merge_where_their_tensor_scales_are_equal(name):
    torch.manual_seed(0)
    net = Net().eval()
    for equal in (False, True):
        with torch.no_grad():
            net.b.weight[0, 0], net.c.weight[0, 0] = 9.0, 9.0 if equal else 5.0  # amax
        model = fold_all_weights(quantized(net, IDS, name=name))
        want, lowered = model(IDS), pt2mx.lower_to_inductor(model)
        torch.testing.assert_close(lowered(IDS), want, rtol=1e-5, atol=1e-6)
        merges = equal or name != "nvfp4"
        assert len(calls(lowered, ops.linear_mx.default)) == (2 if merges else 3), (equal, name)


def test_attention_over_a_cache_of_codes():
    torch.manual_seed(0)
    spec = pt2mx.parse("nvfp4")

    class Attention(torch.nn.Module):
        def forward(self, query, *packed):
            blocks = "fp4_e2m1", 16, torch.float32, -1, 32, "e4m3_f32", None
            key, value = (ops.dequantize_mx(data, scale, *blocks, t) for scale, data, t in (packed[:3], packed[3:]))
            return F.scaled_dot_product_attention(query, key, value)

    query, key, value = (torch.randn(1, 2, n, 32) for n in (3, 5, 5))
    scales = [pt2mx.tensor_scale_mx(x, spec) for x in (key, value)]
    packed = [(*pt2mx.quantize_mx(x, spec, tensor_scale=t), t) for x, t in zip((key, value), scales, strict=True)]
    operands = query, *packed[0], *packed[1]
    lowered = pt2mx.lower_to_inductor(exported(Attention(), *operands))
    want = F.scaled_dot_product_attention(query, *(pt2mx.fake_quantize_mx(x, spec) for x in (key, value)))
    torch.testing.assert_close(lowered(*operands), want)
    (attention,) = calls(lowered, ops.attention_mx.default)
    assert attention.args[10] == "e4m3_f32" and attention.args[11] is not attention.args[12]
    torch.library.opcheck(ops.attention_mx.default, (*operands[:1], *_attention_args(*operands[1:])))


def _attention_args(key_scale, key, key_tensor, value_scale, value, value_tensor):
    blocks = "fp4_e2m1", 16, 32, None, None
    return key, key_scale, value, value_scale, *blocks, "e4m3_f32", key_tensor, value_tensor


def test_weights_of_subgraphs():
    """Codes, scales and the tensor scale of a weight become operands of the call."""
    x = torch.randn(4, 64)
    branches = module_of(
        lambda self, x: torch.cond(x.sum() > 0, lambda x: self.a(x).relu(), self.b, (x,)),
        a=torch.nn.Linear(64, 32),
        b=torch.nn.Linear(64, 32),
    )
    model = exported(branches.eval(), x)
    mark_constants(model)
    for graph in graph_modules(model):
        for node in calls(graph, torch.ops.aten.linear.default):
            for index in (0, 1):
                node.update_arg(index, insert_quantize_dequantize(node.args[index], pt2mx.parse("nvfp4"), node))
        graph.recompile()
    with torch.no_grad():
        want = model(x), model(-x)
        folded = fold_all_weights(model)
        assert all(map(torch.equal, (folded(x), folded(-x)), want))
        assert {f"{layer}.weight_{part}" for layer in "ab" for part in ("data", "scale", "tensor_scale")} < {
            *folded.state_dict()
        }
        lowered = pt2mx.lower_to_inductor(folded)
        torch.testing.assert_close((lowered(x), lowered(-x)), want, rtol=1e-5, atol=1e-5)
