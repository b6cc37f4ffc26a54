import torch

from pt2mx.fx.shifts import without_shifts


class Shifts(torch.nn.Module):
    def forward(self, x, bits):
        ops = torch.ops.aten
        return (
            ops.bitwise_left_shift.Tensor_Scalar(x, 3),
            ops.bitwise_left_shift.Tensor(x, bits),
            ops.bitwise_right_shift.Tensor_Scalar(x, 2),
            ops.bitwise_right_shift.Tensor(x, bits),
        )


def test_products_and_quotients_equal_shifts():
    x, bits = torch.arange(-1000, 1000, dtype=torch.int32), torch.arange(2000, dtype=torch.int32) % 9
    program = without_shifts(torch.export.export(Shifts(), (x, bits)))
    assert not any("shift" in str(node.target) for node in program.graph.nodes)
    for actual, expected in zip(program.module()(x, bits), Shifts()(x, bits), strict=True):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
