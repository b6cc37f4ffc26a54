import torch
from torch import nn

from pt2mx import MXSpec, dequantize_mx, ops, quantize_mx
from pt2mx.fx.fold_weights import fold_weights
from pt2mx.fx.quantize_dequantize import insert_quantize_dequantize


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 8, bias=False))
        self.shared = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return self.block(x @ self.shared.t()) + self.shared.sum()


def folded():
    torch.manual_seed(0)
    model = torch.export.export(Model(), (torch.randn(2, 64),)).module()
    aten = torch.ops.aten
    for node in list(model.graph.nodes):
        if node.target in (aten.linear.default, aten.matmul.default):
            weight = node.args[1]
            node.replace_input_with(weight, insert_quantize_dequantize(weight, MXSpec("fp4_e2m1")))
    model.recompile()
    x = torch.randn(2, 64)
    before = model(x)
    weights = model.block.get_submodule("0").weight.detach(), model.shared.detach().t()
    return fold_weights(model), x, before, weights


def test_folding_changes_no_output():
    model, x, before, _ = folded()
    assert torch.equal(model(x), before)
    assert not model.graph.find_nodes(op="call_function", target=ops.quantize_mx)


def test_codes_replace_the_float_weight():
    model, _, _, (weight, transposed) = folded()
    state = model.state_dict()
    assert set(state) == {"block.0.weight_data", "block.0.weight_scale", "shared", "shared_data", "shared_scale"}
    for name, value in (("block.0.weight", weight), ("shared", transposed)):
        scale, data = quantize_mx(value, "mxfp4")
        assert torch.equal(state[f"{name}_data"], data) and torch.equal(state[f"{name}_scale"], scale)
        assert state[f"{name}_data"].dtype == torch.uint8
        assert dequantize_mx(data, scale, "mxfp4").shape == value.shape


def test_a_weight_with_a_float_consumer_stays():
    model, _, _, _ = folded()
    assert "shared" in dict(model.named_parameters())
    assert "block.0.weight" not in dict(model.named_parameters())


def test_two_specs_of_one_weight_get_two_copies():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return x @ self.weight, nn.functional.linear(x, self.weight)

    model = torch.export.export(Twice(), (torch.randn(2, 64),)).module()
    for node in list(model.graph.nodes):
        if node.target in (torch.ops.aten.linear.default, torch.ops.aten.matmul.default):
            axis = -1 if node.target == torch.ops.aten.linear.default else -2
            weight = node.args[1]
            node.replace_input_with(weight, insert_quantize_dequantize(weight, MXSpec("fp8_e4m3", axis=axis)))
    model.recompile()
    x = torch.randn(2, 64)
    want = model(x)
    got = fold_weights(model)(x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert set(model.state_dict()) == {"weight_data", "weight_scale", "weight_data_1", "weight_scale_1"}
