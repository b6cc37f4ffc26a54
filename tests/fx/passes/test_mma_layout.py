import pytest
import torch

from pt2mx import quantize_mx
from pt2mx.fx.passes.mma_layout import use_mma_layout
from pt2mx.ops import linear
from tests.flow import exported
from tests.graph import called


class Packed(torch.nn.Module):
    """Two matmuls with one packed weight, and optionally another user of its codes."""

    def __init__(self, k=64, dtype=torch.bfloat16, read=False):
        super().__init__()
        scale, data = quantize_mx(torch.randn(24, k), "mxfp4")
        self.register_buffer("weight_data", data)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("bias", torch.randn(24).to(dtype))
        self.read = read

    def forward(self, x):
        weight = self.weight_data, self.weight_scale
        y = linear.linear_mx(x, *weight, self.bias, "fp4_e2m1", 32, 0)
        y = y + linear.linear_mx(x * 2, *weight, None, "fp4_e2m1", 32, 0)
        return (y, self.weight_data[:2].clone()) if self.read else y


def matmuls(dtype=torch.bfloat16, **options):
    x = torch.randn(3, options.get("k", 64), dtype=dtype)
    return exported(Packed(dtype=dtype, **options), x), x


@pytest.mark.parametrize("read", [False, True])
def test_matmuls_read_one_buffer(read):
    model, x = matmuls(read=read)
    want = model(x)
    assert called(model).count(linear.linear_mx) == 2
    assert use_mma_layout(model, everywhere=True) is model
    assert called(model).count(linear.linear_mx_mma_layout) == 2 and linear.linear_mx not in called(model)
    names = {node.target for node in model.graph.find_nodes(op="get_attr")}
    assert names == {"weight_data_mma", "weight_scale_mma", "bias"} | ({"weight_data"} if read else set())
    torch.testing.assert_close(model(x), want, rtol=0, atol=0)
    (first, _) = model.graph.find_nodes(op="call_function", target=linear.linear_mx_mma_layout)
    assert first.args[1].meta["val"].shape == model.weight_data_mma.shape == (2, 1, 2, 1, 32, 16)
    assert first.meta["val"].shape == (3, 24) and "stack_trace" in first.meta
    torch.export.export(model, (x,))


@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"k": 36}])
def test_others_stay(options):
    model, x = matmuls(**options)
    before, want = model.code, model(x)
    assert use_mma_layout(model, everywhere=True).code == before
    assert torch.equal(model(x), want)


def test_on_the_cpu_nothing_changes():
    model, _ = matmuls()
    before = model.code
    assert use_mma_layout(model).code == before


def test_a_weight_that_the_layout_cannot_hold_stays():
    model, x = matmuls()
    model.weight_scale[0, 0] = 255
    before = model.code
    assert use_mma_layout(model, everywhere=True).code == before
    assert model(x)[:, 0].isnan().all()
