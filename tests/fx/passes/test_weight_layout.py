import pytest
import torch
from torch.nn import functional as F

from pt2mx import FORMATS, MXSpec, ops, quantize_mx
from pt2mx.fx.graph.qdq import SPEC_KEY, spec_of_dequantize
from pt2mx.fx.graph.tensors import delete_unused_tensors
from pt2mx.fx.passes.packed_operands import use_packed_weights
from pt2mx.fx.passes.weight_layout import make_weights_k_major, use_mma_layout
from pt2mx.kernels import select
from pt2mx.ops import linear
from tests.every_device import everywhere
from tests.flow import exported
from tests.graph import called, calls
from tests.models import module_of
from tests.packed_weight import Matmul, is_packed


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_of_conv1d_is_transposed_once(name):
    module = Matmul(lambda x, w, b: (torch.addmm(b, x, w), x @ w), (70, 24), name, axis=0)
    x = torch.randn(2, 70)
    model = exported(module, x)
    want, before = model(x), model.graph.find_nodes(op="call_function", target=ops.dequantize_mx)[0].meta["val"]
    assert make_weights_k_major(model) is model
    (dequantize,) = calls(model, ops.dequantize_mx)
    (transpose,) = calls(model, torch.ops.aten.transpose.int)
    assert [n.target for n in dequantize.args[:2]] == ["data_t", "scale_t"] and dequantize.args[5] == 1
    assert dequantize.meta["val"].shape == (24, 70) and transpose.meta["val"].shape == before.shape == (70, 24)
    assert torch.equal(transpose.target(dequantize.target(model.data_t, model.scale_t, *dequantize.args[2:]), 0, 1),
                       module.weight())  # fmt: skip
    assert model.data_t.is_contiguous() and torch.equal(model.data_t, module.data.t())
    for got, expected in zip(model(x), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert is_packed(use_packed_weights(model)) and len(calls(model, linear.linear_mx)) == 2
    delete_unused_tensors(model)
    assert set(model.state_dict()) == {"data_t", "scale_t", "bias"}
    for got, expected in zip(model(x), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_other_readers_read_the_same_buffer():
    module = Matmul(lambda x, w, b: (x @ w, w.sum(0)), (70, 24), axis=0)
    x = torch.randn(2, 70)
    model = exported(module, x)
    want = model(x)
    use_packed_weights(make_weights_k_major(model))
    delete_unused_tensors(model)
    assert {"data", "scale"}.isdisjoint(model.state_dict()) and model.data_t.shape == (24, 35)
    torch.testing.assert_close(model(x), want)


def test_experts():
    module = Matmul(lambda x, w, b, offs: F.grouped_mm(x, w, offs=offs), (3, 64, 24), "fp8_e4m3", -2, torch.bfloat16)
    args = torch.randn(8, 64, dtype=torch.bfloat16), torch.tensor([2, 2, 8], dtype=torch.int32)
    model = exported(module, *args)
    want = model(*args)
    assert is_packed(use_packed_weights(make_weights_k_major(model)))
    assert model.data_t.shape == (3, 24, 64) and model.scale_t.shape == (3, 24, 2)
    torch.testing.assert_close(model(*args), want)


def test_the_spec_follows():
    model = exported(Matmul(lambda x, w, b: x @ w, (70, 24), axis=0), torch.randn(2, 70))
    (dequantize,) = calls(model, ops.dequantize_mx)
    dequantize.meta[SPEC_KEY] = MXSpec("fp4_e2m1", axis=0, scale_mode="rceil")
    (dequantize,) = calls(make_weights_k_major(model), ops.dequantize_mx)
    assert spec_of_dequantize(dequantize) == MXSpec("fp4_e2m1", axis=1, scale_mode="rceil")


@pytest.mark.parametrize(
    "module",
    [
        Matmul(lambda x, w, b: F.linear(x, w, b)),  # they are last
        Matmul(lambda x, w, b: F.linear(x, w, b), axis=0),  # the matmul reduces the other dimension
        Matmul(lambda x, w, b: F.conv1d(x.unsqueeze(0).mT, w), (24, 70, 1), axis=1),
        Matmul(lambda x, w, b: x.sum() + w.sum(), (70, 24), axis=0),
    ],
)
def test_other_weights_stay(module):
    model = exported(module, torch.randn(2, 70))
    code = model.code
    assert make_weights_k_major(model).code == code and "data_t" not in model.state_dict()


def test_weights_that_are_inputs_stay():
    args = torch.randn(2, 64), torch.zeros(64, 8, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.uint8)
    inner = module_of(lambda self, x, data, scale: x @ ops.dequantize_mx(data, scale, "fp8_e4m3", 32, torch.float32, 0))
    model = exported(inner, *args)
    code = model.code
    assert make_weights_k_major(model).code == code


class Transposed(Matmul):
    """A weight whose codes have another dimension last in memory, as in a parameter's transpose."""

    def __init__(self, matmul, axis=1):
        super().__init__(matmul, axis=axis)
        self.data, self.scale = self.data.t().contiguous().t(), self.scale.t().contiguous().t()


def test_blocks_that_are_last_but_not_in_memory():
    x = torch.randn(2, 70)
    module = Transposed(lambda x, w, b: F.linear(x, w, b))
    model = exported(module, x)
    want = model(x)
    make_weights_k_major(model)
    assert model.data_t.is_contiguous() and torch.equal(model.data_t, module.data)
    torch.testing.assert_close(model(x), want)
    assert is_packed(use_packed_weights(model))


def test_weights_that_others_read_in_their_order_stay():
    model = exported(Transposed(lambda x, w, b: (F.linear(x, w, b), w * 2)), torch.randn(2, 70))
    code = model.code
    assert make_weights_k_major(model).code == code


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
    assert everywhere(use_mma_layout)(model) is model
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
    assert everywhere(use_mma_layout)(model).code == before
    assert torch.equal(model(x), want)


def test_on_the_cpu_nothing_changes():
    model, _ = matmuls()
    before = model.code
    assert use_mma_layout(model).code == before


@pytest.mark.parametrize(
    ("device", "capability", "elements"),
    [
        ("cpu", None, []),
        ("cuda", (7, 5), []),
        ("cuda", (8, 0), ["fp8_e5m2", "fp4_e2m1"]),
        ("cuda", (8, 9), ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"]),
        ("cuda", (9, 0), ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"]),
    ],
)
def test_gpus_with_kernels(monkeypatch, device, capability, elements):
    monkeypatch.setitem(select._RUNS, "cuda", lambda device: capability >= (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    names = ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
    with torch._subclasses.FakeTensorMode():
        codes = torch.empty(4, device=device)
    supports = select.supports
    assert [name for name in names if supports("multiply weights in the MMA layout", codes, name)] == elements


def test_a_weight_that_the_layout_cannot_hold_stays():
    model, x = matmuls()
    model.weight_scale[0, 0] = 255
    before = model.code
    assert everywhere(use_mma_layout)(model).code == before
    assert model(x)[:, 0].isnan().all()
