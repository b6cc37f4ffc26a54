"""`torch.ops.torchmx.*`. The bytes themselves are compared with TorchMX's in test_golden."""

import pytest
import torch

from pt2mx.torchmx import dtypes
from pt2mx.torchmx.mx_tensor import dequantize_mx, quantize_mx

OPS = torch.ops.torchmx


def test_schemas_are_those_of_torchmx():
    assert str(OPS.quantize_mx.default._schema) == (
        "torchmx::quantize_mx(Tensor data_hp, str elem_dtype_name, SymInt block_size) -> (Tensor, Tensor)"
    )
    assert str(OPS.dequantize_mx.default._schema) == (
        "torchmx::dequantize_mx(Tensor data_lp, Tensor shared_exp_e8m0, str elem_dtype_name, SymInt block_size, "
        "ScalarType target_dtype, SymInt block_dim) -> Tensor"
    )


@pytest.mark.parametrize("name", [*dtypes.STR_TO_SUPPORTED_ELEM_DTYPE, "float8_e5m2", "int5", "int16"])
def test_they_are_the_functions(name):
    """Also of ragged lengths and of transposed tensors, with the fake kernels that tracing asks."""
    torch.manual_seed(0)
    for x in (torch.randn(4, 64).bfloat16(), torch.randn(2, 3, 33), torch.randn(6, 4).t()):
        scale, data = OPS.quantize_mx(x, name, 4)
        assert all(torch.equal(a, b) for a, b in zip((scale, data), quantize_mx(x, name, 4), strict=True))
        where = (data, scale, name, 4, torch.float32, x.dim() - 1)
        assert torch.equal(OPS.dequantize_mx(*where), dequantize_mx(*where))
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(OPS.quantize_mx.default, (x, name, 4), test_utils=checks)
        torch.library.opcheck(OPS.dequantize_mx.default, where, test_utils=checks)


def test_they_stay_calls_in_an_exported_program():
    class Model(torch.nn.Module):
        def forward(self, x):
            scale, data = OPS.quantize_mx(x, "float4_e2m1", 32)
            return OPS.dequantize_mx(data, scale, "float4_e2m1", 32, torch.float32, -1)

    x, shapes = torch.randn(4, 64), ({0: torch.export.Dim("rows")},)
    program = torch.export.export(Model(), (x,), dynamic_shapes=shapes)
    called = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert called == [OPS.quantize_mx.default, OPS.dequantize_mx.default]
    x = torch.randn(7, 64)
    assert torch.equal(program.module()(x), Model()(x))
