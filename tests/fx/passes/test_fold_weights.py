import torch
from torch import nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers torch.ops.quantized_decomposed

from pt2mx import MXSpec, dequantize_mx, ops, quantize_mx
from pt2mx.fx.graph.node import tensor_of
from pt2mx.fx.graph.qdq import insert_quantize_dequantize
from pt2mx.fx.passes.fold_weights import fold_constant, fold_weights
from tests.models import module_of


def folded():
    torch.manual_seed(0)
    net = module_of(
        lambda self, x: self.block(x @ self.shared.t()) + self.shared.sum(),
        block=nn.Sequential(nn.Linear(64, 8, bias=False)),
        shared=nn.Parameter(torch.randn(64, 64)),
    )
    model = torch.export.export(net, (torch.randn(2, 64),)).module()
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
    twice = module_of(
        lambda self, x: (x @ self.weight, nn.functional.linear(x, self.weight)),
        weight=nn.Parameter(torch.randn(64, 64)),
    )
    model = torch.export.export(twice, (torch.randn(2, 64),)).module()
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


def test_a_tied_weight_under_two_names_gets_one_copy():
    """Also behind a view; another spec gets another copy."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(16, 64), nn.Linear(64, 16, bias=False)

        def forward(self, ids, x):
            return self.embedding(ids), self.head(x), x @ self.head.weight.t(), x @ self.embedding.weight.t()

    inputs = (torch.tensor([3]), torch.randn(2, 64))
    model = torch.export.export(Tied(), inputs).module()
    model.head.weight = model.embedding.weight  # two names of one parameter
    modes = {0: ("fp4_e2m1", -1), 1: ("fp4_e2m1", -1), 2: ("fp8_e4m3", -2), 3: ("fp8_e4m3", -2)}
    consumers = [n for n in model.graph.nodes if n.op == "call_function" and n.target != torch.ops.aten.t.default]
    consumers = [n for n in consumers if isinstance(n.target, torch._ops.OpOverload)]
    assert len(consumers) == 4
    for i, node in enumerate(consumers):
        element, axis = modes[i]
        weight = node.args[0 if i == 0 else 1]
        node.replace_input_with(weight, insert_quantize_dequantize(weight, MXSpec(element, axis=axis)))
    model.recompile()
    want = model(*inputs)
    folded_model = fold_weights(model)
    assert all(torch.equal(a, b) for a, b in zip(folded_model(*inputs), want, strict=True))
    assert set(folded_model.state_dict()) == {
        "embedding.weight_data", "embedding.weight_scale", "head.weight_data", "head.weight_scale",
    }  # fmt: skip


def test_integer_quantization_of_torchao_is_folded_too():
    quantize, dequantize = (
        getattr(torch.ops.quantized_decomposed, name).default
        for name in ("quantize_per_tensor", "dequantize_per_tensor")
    )
    modes = (0.02, 3, -128, 127, torch.int8)
    model = torch.export.export(nn.Linear(8, 4), (torch.randn(2, 8),)).module()
    (linear,) = model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    with model.graph.inserting_before(linear):
        for i in (0, 1):
            codes = model.graph.call_function(quantize, (linear.args[i], *modes))
            linear.update_arg(i, model.graph.call_function(dequantize, (codes, *modes)))
    model.recompile()
    x, weight = torch.randn(2, 8), model.weight.detach()
    want = model(x)
    assert torch.equal(fold_weights(model)(x), want)
    assert set(model.state_dict()) == {"weight_data", "bias"}
    assert torch.equal(model.weight_data, quantize(weight, *modes))
    assert len(model.graph.find_nodes(op="call_function", target=quantize)) == 1, "the activation's stays"


def test_a_folded_view_does_not_keep_its_whole_storage():
    sliced = module_of(lambda self, x: x + self.table[:1], table=nn.Parameter(torch.randn(100, 64)))
    model = torch.export.export(sliced, (torch.randn(2, 64),)).module()
    view = next(node for node in model.graph.nodes if node.target is torch.ops.aten.slice.Tensor)
    buffer = tensor_of(model, fold_constant(model, view, "table_row"))
    assert torch.equal(buffer, model.table[:1]) and buffer.untyped_storage().nbytes() == buffer.nbytes
