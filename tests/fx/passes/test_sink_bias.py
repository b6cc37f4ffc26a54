import pytest
import torch

from pt2mx import ops
from pt2mx.fx.passes.fuse_activation_quantize import sink_bias
from pt2mx.ops import linear

aten = torch.ops.aten


class Packed(torch.nn.Module):
    def __init__(self, after, bias=True):
        super().__init__()
        self.register_buffer("data", torch.randint(100, (24, 64), dtype=torch.uint8))
        self.register_buffer("scale", torch.full((24, 2), 126, dtype=torch.uint8))
        self.register_buffer("bias", torch.randn(24) if bias else None)
        self.after = after

    def forward(self, x):
        return self.after(linear.linear_mx(x, self.data, self.scale, self.bias, "fp8_e4m3", 32, 0))


def quantized(x, axis=-1):
    return ops.fake_quantize_mx(x, "fp8_e4m3", 8, axis, "floor", "even", None, "identity")


@pytest.mark.parametrize(
    ("after", "bias", "split"),
    [
        (quantized, True, True),
        (lambda y: quantized(y.view(2, 3, 2, 12).transpose(1, 2), -2), True, True),
        (lambda y: (quantized(y), quantized(y, 1)), True, True),
        (quantized, False, False),
        (lambda y: quantized(torch.relu(y)), True, False),
        (lambda y: (quantized(y), y + 1), True, False),
        (lambda y: y.transpose(0, 1), True, False),
    ],
)
def test_a_bias_is_split_where_quantization_alone_follows(after, bias, split):
    x = torch.randn(2, 3, 64)
    model = torch.export.export(Packed(after, bias), (x,)).module()
    want, code = model(x), model.code
    assert sink_bias(model) is model
    if not split:
        assert model.code == code
        return
    (matmul,) = model.graph.find_nodes(op="call_function", target=linear.linear_mx)
    (added,) = matmul.users
    assert matmul.args[3] is None and added.target == aten.add.Tensor
    assert added.meta["val"].shape == (2, 3, 24) and added.meta["stack_trace"] == matmul.meta["stack_trace"]
    torch.testing.assert_close(model(x), want, rtol=0.07, atol=1e-6)  # at most a step of the grid
