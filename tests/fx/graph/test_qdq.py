import operator

import pytest
import torch

from pt2mx import MXSpec, fake_quantize_mx, ops
from pt2mx.fx.graph.qdq import spec_of_dequantize
from tests.models import quantized_double


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp6_e2m3", "fp4_e2m1"])
def test_pair_computes_the_quantized_values(name, dtype):
    spec = MXSpec(name, 16, -1, "rceil")
    model, dequantize = quantized_double(spec, dtype)
    x = torch.randn(3, 70, dtype=dtype)
    assert torch.equal(model(x), fake_quantize_mx(x, spec) * 2)
    targets = [n.target for n in model.graph.nodes if n.op == "call_function" and n.target != torch.ops.aten.mul.Tensor]
    assert targets == [ops.quantize_mx, operator.getitem, operator.getitem, ops.dequantize_mx]
    assert spec_of_dequantize(dequantize) == spec.replace(axis=1)


def test_nodes_carry_the_meta_of_their_tensor():
    _, dequantize = quantized_double(MXSpec("fp6_e3m2"))
    x = dequantize.all_input_nodes[0].args[0].args[0]
    for node in (dequantize, *dequantize.all_input_nodes):
        assert node.meta.get("nn_module_stack") == x.meta.get("nn_module_stack")
    assert dequantize.meta["val"].shape == (3, 70) and dequantize.meta["val"].dtype == torch.float32
    assert [n.meta["val"].shape for n in dequantize.all_input_nodes] == [(3, 54), (3, 3)]


@pytest.mark.diagonal
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp6_e2m3", "fp4_e2m1"])
@pytest.mark.parametrize("axis", [0, 1])
def test_dynamic_lengths_export_again(name, axis):
    """A scale has one block for one range of lengths and more for others; export must not settle for either."""
    spec = MXSpec(name, 32, axis)
    model, _ = quantized_double(spec, dynamic=True)
    shapes = ({0: torch.export.Dim("n"), 1: torch.export.Dim("k", max=4096)},)
    again = torch.export.export(model, (torch.randn(3, 20),), dynamic_shapes=shapes).module()
    for shape in [(2, 2), (3, 70), (65, 33), (40, 5)]:
        x = torch.randn(shape)
        assert torch.equal(again(x), fake_quantize_mx(x, spec) * 2)
