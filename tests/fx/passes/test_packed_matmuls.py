import pytest
import torch
from torch.nn import functional as F

from pt2mx import FORMATS, dequantize_mx, ops
from pt2mx.fx.graph.node import GroupedLinearMX, LinearMX
from pt2mx.fx.passes.packed_operands import use_packed_weights
from pt2mx.ops import linear
from tests.flow import exported
from tests.graph import calls
from tests.packed_weight import PACKED, Matmul, is_packed

aten = torch.ops.aten


def lowered(model, *args):
    model = exported(model, *args)
    want = model(*args)
    assert use_packed_weights(model) is model
    torch.testing.assert_close(model(*args), want)
    return model


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_linear(name, dtype):
    module = Matmul(lambda x, w, b: F.linear(x, w, b), name=name, dtype=dtype)
    model = lowered(module, torch.randn(2, 3, 70, dtype=dtype))
    (packed,) = calls(model, linear.linear_mx)
    call = LinearMX.expect(packed)
    assert (call.x.op, call.codes.target, call.scale.target, call.bias.target) == (
        "placeholder",
        "data",
        "scale",
        "bias",
    )
    assert (call.spec.element.name, call.spec.block_size, call.rotation, call.target_dtype) == (name, 32, 0, None)
    assert packed.meta["val"].shape == (2, 3, 24) and packed.meta["val"].dtype == dtype
    assert {"nn_module_stack", "stack_trace"} <= packed.meta.keys()
    assert not calls(model, ops.dequantize_mx, aten.linear.default)


@pytest.mark.parametrize(
    ("matmul", "shape"),
    [
        (lambda x, w, b: F.linear(x, w), (2, 70)),
        (lambda x, w, b: F.linear(x, w), (70,)),
        (lambda x, w, b: x @ w.t(), (2, 3, 70)),
        (lambda x, w, b: x @ w.t(), (70,)),
        (lambda x, w, b: torch.mm(x, w.transpose(0, 1)), (2, 70)),
        (lambda x, w, b: torch.mm(x, w.permute(1, 0).contiguous()), (2, 70)),
        (lambda x, w, b: torch.mm(x, w.T), (2, 70)),
        (lambda x, w, b: torch.addmm(b, x, w.mT), (2, 70)),
        (lambda x, w, b: F.linear(x, w.t().t(), b), (2, 70)),
        (lambda x, w, b: F.linear(torch.relu(x), w, b), (0, 70)),
    ],
)
def test_other_matmuls(matmul, shape):
    assert is_packed(lowered(Matmul(matmul), torch.randn(shape)))


def test_decomposed_program():
    program = torch.export.export(Matmul(lambda x, w, b: F.linear(x, w, b)), (torch.randn(2, 3, 70),))
    model = program.run_decompositions().module()
    assert calls(model, aten.addmm.default)
    assert is_packed(use_packed_weights(model))


@pytest.mark.parametrize(
    ("matmul", "shape", "module"),
    [
        # scaled, or a bias that is no vector or has another dtype
        (lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2), (2, 70), {}),
        (lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5), (2, 70), {}),
        (lambda x, w, b: torch.addmm(x[:, :24], x, w.t()), (2, 70), {}),
        (lambda x, w, b: torch.addmm(b[:1], x, w.t()), (2, 70), {}),
        # blocks run along the dimension that is not reduced, or are not last
        (lambda x, w, b: x @ w, (2, 24), {}),
        (lambda x, w, b: F.linear(x, w, b), (2, 70), {"axis": 0}),
        (lambda x, w, b: x @ w, (2, 70), {"axis": 0, "shape": (70, 24)}),
        # the weight is the first factor, or one of several
        (lambda x, w, b: w @ x, (70, 2), {}),
        (lambda x, w, b: torch.bmm(x, w), (3, 2, 70), {"axis": 1, "shape": (3, 70, 24)}),
        (lambda x, w, b: F.linear(x, w * 2, b), (2, 70), {}),
        (lambda x, w, b: F.linear(x, w.mul_(2), b) + F.linear(x, w), (2, 70), {}),
        (lambda x, w, b: F.conv1d(x, w.unsqueeze(-1)), (2, 70, 5), {"axis": 1}),
    ],
)
def test_what_linear_mx_does_not_compute_stays(matmul, shape, module):
    model = lowered(Matmul(matmul, **module), torch.randn(shape))
    assert calls(model, ops.dequantize_mx) and not calls(model, *PACKED)


def test_autocast_decides_the_dtype():
    """Autocast computes a matmul of float32 tensors in bfloat16."""

    def matmul(x, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w, b)

    program = torch.export.export(Matmul(matmul), (torch.randn(2, 70),))
    model = program.module()
    for graph in [m for m in model.modules() if isinstance(m, torch.fx.GraphModule)]:
        use_packed_weights(graph)
        assert not calls(graph, *PACKED)
    assert model(torch.randn(2, 70)).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(3, 24, 64), (3, 64, 24)])
def test_grouped(shape):
    """Experts: weights (E, N, K) directly, weights (E, K, N) with blocks along K through a transposition."""
    transposed = shape[1] == 24

    def matmul(x, w, b, offs):
        return F.grouped_mm(x, w.transpose(-2, -1) if transposed else w, offs=offs)

    module = Matmul(matmul, shape, "fp8_e4m3", -1 if transposed else -2, torch.bfloat16)
    offs = torch.tensor([2, 2, 8], dtype=torch.int32)
    model = lowered(module, torch.randn(8, 64, dtype=torch.bfloat16), offs)
    packed = calls(model, linear.grouped_linear_mx)
    assert bool(packed) == is_packed(model) == transposed
    if transposed:
        call = GroupedLinearMX.expect(packed[0])
        assert (call.codes.target, call.scale.target, call.offs.op) == ("data", "scale", "placeholder")
        assert (call.spec.element.name, call.spec.block_size, call.target_dtype) == ("fp8_e4m3", 32, None)


def test_readers_share_one_buffer():
    module = Matmul(lambda x, w, b: (F.linear(x, w, b), x @ w.t(), w.sum()))
    model = lowered(module, torch.randn(2, 70))
    first, second = calls(model, linear.linear_mx)
    assert [n.target for n in first.args[1:3]] == [n.target for n in second.args[1:3]] == ["data", "scale"]
    assert len(calls(model, ops.dequantize_mx)) == 1, "the sum's"
    assert set(model.state_dict()) == {"data", "scale", "bias"}


def test_codes_that_the_graph_writes_stay():
    class Written(Matmul):
        def forward(self, x):
            w = self.weight()
            self.data.zero_()
            return F.linear(x, w)

    model = torch.export.export(Written(None), (torch.randn(2, 70),)).module()
    assert not calls(use_packed_weights(model), *PACKED)


def test_dynamic_shapes():
    module = Matmul(lambda x, w, b: F.linear(x, w, b))
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    model = torch.export.export(module, (torch.randn(2, 3, 70),), dynamic_shapes=shapes).module()
    assert is_packed(use_packed_weights(model))
    weight = dequantize_mx(module.data, module.scale, "fp4_e2m1", length=70)
    for shape in [(1, 1, 70), (5, 4, 70)]:
        x = torch.randn(shape)
        torch.testing.assert_close(model(x), F.linear(x, weight, module.bias))
    again = torch.export.export(model, (torch.randn(2, 3, 70),), dynamic_shapes=shapes).module()
    assert torch.equal(again(x), model(x))
