import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config, lower_to_inductor, ops
from pt2mx.fx import lower
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.fx.graph.tensors import delete_unused_tensors
from pt2mx.fx.passes.bf16_matmul import use_bf16_matmul
from pt2mx.fx.passes.fuse_activation_quantize import fuse_activation_quantize
from pt2mx.fx.passes.scaled_mm import use_scaled_mm
from pt2mx.kernels import select
from pt2mx.kernels.scaled_mm import FORMS
from pt2mx.ops.linear import linear_mx
from tests.every_device import everywhere
from tests.flow import convert
from tests.graph import calls
from tests.models import BATCH, module_of, tied


@pytest.fixture(autouse=True)
def without_what_is_for_a_cpu(monkeypatch):
    """Earlier passes for the CPU would change float32 matmuls and quantizations."""
    of_cpu = use_bf16_matmul, fuse_activation_quantize
    monkeypatch.setattr(lower, "PASSES", [step for step in lower.PASSES if step.graph_pass not in of_cpu])


def scaled(model, graph_pass=use_scaled_mm):
    for graph in graph_modules(model):
        graph_pass(graph)
    delete_unused_tensors(model)
    return model


class Net(nn.Module):
    """q, k, v of one input, and two layers that tensor cores do not support: one for its N, one for its K."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 32), nn.Linear(64, 32, bias=False), nn.Linear(64, 32)
        self.odd, self.ragged = nn.Linear(64, 5), nn.Linear(5, 16)
        self.to(dtype)

    def forward(self, x):  # (B, S, 64) -> (B, S, 32) three times, (B, S, 5), (B, S, 16)
        return self.q(x), self.k(x), self.v(x), self.odd(x), self.ragged(x[..., :5])


def lowered(weight, activation, dtype=torch.bfloat16, model=None, shape=(2, 3, 64)):
    x = torch.randn(shape, dtype=dtype)
    quantizer = MXQuantizer().set_global(get_default_mx_quantization_config(weight=weight, activation=activation))
    converted = convert(model or Net(dtype), (x,), quantizer, shapes=BATCH)
    return converted, lower_to_inductor(converted), x


mx = torch.ops.pt2mx
OPERATORS = (mx.scaled_mm_mx.default, linear_mx, ops.quantize_mx, mx.swizzle_scale.default)


def counts(model):
    """Calls of each of OPERATORS in the graph itself."""
    return [len(calls(model, operator)) for operator in OPERATORS]


@pytest.mark.compiled_except("form0", "form3")
@pytest.mark.parametrize("form", FORMS)
def test_matmuls_on_tensor_cores_agree(form):
    """Three of five layers; x is quantized once, and each call swizzles only its scales."""
    activation, weight = form
    converted, before, x = lowered(weight, activation)
    want = before(x)
    after = scaled(before, everywhere(use_scaled_mm))
    assert counts(after) == [3, 2, 1, 1]
    assert {n for n, _ in after.named_buffers()} >= {"q.weight_scale_swizzled", "q.weight_data", "odd.weight_scale"}
    assert "q.weight_scale" not in dict(after.named_buffers())
    torch.testing.assert_close(after(x), want, rtol=0.02, atol=0.02)
    x = torch.randn(70, 3, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(after(x), converted(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("modes", ["(rceil)", "(even,half_away)", ""])
def test_one_product_agrees_up_to_the_order_of_sums(modes):
    model = nn.Linear(160, 48).float()
    converted, before, x = lowered("mxfp8", f"mxfp8_e5m2{modes}", torch.float32, model, (4, 160))
    after = scaled(lower_to_inductor(converted), everywhere(use_scaled_mm))
    assert counts(after) == [1, 0, 1, 1]
    torch.testing.assert_close(after(x), before(x))
    torch.testing.assert_close(after(x), converted(x))


@pytest.mark.compiled
def test_graph_exports_and_compiles(compiler, tmp_path, run_python):
    converted, before, x = lowered("mxfp8", "mxfp8", torch.float32, nn.Linear(64, 32), (4, 64))
    want, after = before(x), scaled(before, everywhere(use_scaled_mm))
    program = torch.export.export(after, (x,), dynamic_shapes=BATCH)
    torch.testing.assert_close(program.module()(x), want)
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, after(x)), tmp_path / "io.pt")
    code = """
import torch, pt2mx
x, want = torch.load('io.pt')
print(torch.equal(torch.export.load('model.pt2').module()(x), want))
"""
    assert run_python(code, cwd=tmp_path).strip() == "True"
    compiled = torch.compile(after, fullgraph=True, dynamic=True)
    for rows in (4, 130):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x), converted(x))


def test_tied_weights_and_graphs_inside():
    def forward(self, x):
        return self.a(x), self.b(x), torch.cond(x.sum() > 0, self.inner, lambda x: self.inner(x) + 1, (x,))

    model = module_of(forward, **{name: nn.Linear(64, 64) for name in ("a", "inner", "b")})
    converted, before, x = lowered("mxfp8", "mxfp8", torch.float32, tied(model, "a", "b"), (4, 64))
    after = scaled(before, everywhere(use_scaled_mm))
    assert [counts(graph)[:2] for graph in graph_modules(after)] == [[1, 0], [1, 0], [2, 0]]
    assert sum(name.endswith("_swizzled") for name, _ in after.named_buffers()) == 1
    for sign in (x, -x):
        torch.testing.assert_close(after(sign), converted(sign))


def test_codes_of_a_pair_are_used():
    """A pair whose codes are an output too."""

    def forward(self, x):
        scale, data = torch.ops.pt2mx.quantize_mx(x, "fp8_e4m3", 32, -1, "floor", "even")
        y = torch.ops.pt2mx.dequantize_mx(data, scale, "fp8_e4m3", 32, x.dtype, 1)
        return torch.ops.pt2mx.linear_mx(y, self.data, self.scale, None, "fp8_e4m3", 32, 0), data

    x = torch.randn(4, 64)
    scale, data = pt2mx.quantize_mx(torch.randn(32, 64), "mxfp8")
    pair = module_of(forward, data=nn.Buffer(data), scale=nn.Buffer(scale))
    model = torch.export.export(pair, (x,)).module()
    want = model(x)
    after = scaled(model, everywhere(use_scaled_mm))
    assert counts(after) == [1, 0, 1, 1] and not calls(after, ops.dequantize_mx)
    torch.testing.assert_close(after(x), want)


@pytest.mark.parametrize(
    ("weight", "activation", "dtype"),
    [
        ("mxfp8_e5m2", "mxfp8_e5m2", torch.bfloat16),  # not two E5M2
        ("mxfp4", "mxfp8", torch.bfloat16),  # nor a mixture of widths
        ("mxfp6", "mxfp6", torch.bfloat16),
        ("mxfp4", "mxfp4", torch.float32),  # FP4 gives bfloat16 alone
        ("mxfp8", "mxfp8{16}", torch.bfloat16),
        ("mxfp8{64}", "mxfp8{64}", torch.bfloat16),
        ("mxfp8", "mxfp8(floor,stochastic)", torch.bfloat16),
        ("mxfp8", None, torch.bfloat16),
    ],
)
def test_what_tensor_cores_do_not_take_is_left_alone(weight, activation, dtype):
    _, before, _ = lowered(weight, activation, dtype)
    after = scaled(before, everywhere(use_scaled_mm))
    assert counts(after)[:2] == [0, 5]


def test_without_such_cores_nothing_changes():
    _, before, _ = lowered("mxfp8", "mxfp8")
    code = before.code
    assert scaled(before).code == code


@pytest.mark.parametrize(
    ("capability", "form", "matmuls"),
    [((9, 0), 0, 0), ((10, 0), 0, 1), ((12, 0), 0, 1), ((10, 3), 3, 1), ((12, 0), 3, 0)],
)
def test_gpu_decides(capability, form, matmuls, monkeypatch):
    """FP4 runs on compute capability 10 only."""
    activation, weight = list(FORMS)[form]
    _, before, _ = lowered(weight, activation, torch.bfloat16, nn.Linear(64, 32).bfloat16(), (4, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(select._RUNS, "cuda", lambda device: True)
    with torch._subclasses.FakeTensorMode():
        on_gpu = torch.empty(4, 32, dtype=torch.bfloat16, device="cuda")
    (node,) = before.graph.find_nodes(op="call_function", target=torch.ops.pt2mx.linear_mx.default)
    node.meta["val"] = on_gpu
    assert counts(scaled(before))[0] == matmuls
