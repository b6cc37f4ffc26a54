"""What torchao's PT2E machinery does to operators and modules that it does not know: one test for each trap that was
met, by its name. The issue of each is in its docstring."""

import copy
import gc
import operator
import weakref

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXFakeQuantize, MXObserver, MXQuantizer, get_default_mx_quantization_config, ops
from pt2mx.extras import import_extra
from pt2mx.pt2e.torchao_pt2e import FakeQuantizeBase, ObserverBase
from tests.flow import calibrated, exported

CONFIG = get_default_mx_quantization_config("mxfp4", "mxfp8")
QUANTIZER = MXQuantizer().set_global(CONFIG)


def converted(model, *inputs, quantizer=QUANTIZER):
    """(converted, prepared with fake quantization on), of an evaluated model."""
    prepared = calibrated(exported(model.eval(), *inputs), quantizer, *inputs)
    pt2mx.enable_fake_quant(prepared)
    return pt2mx.convert_pt2e(prepared), prepared


def pairs(model):
    """The specs of the pairs in a graph."""
    return [n.meta["mx_spec"] for n in model.graph.find_nodes(op="call_function", target=ops.dequantize_mx)]


class Product(nn.Module):
    def forward(self, x, y):
        return x @ y


def test_trap_01_hook():
    """convert calls `convert` of modules that subclass torchao's base classes; others stay call_modules."""
    assert issubclass(MXObserver, ObserverBase) and issubclass(MXFakeQuantize, FakeQuantizeBase)
    model, _ = converted(nn.Linear(64, 8), torch.randn(2, 64))
    assert not [n for n in model.graph.nodes if n.op == "call_module" and n.target != "_guards_fn"]


def test_trap_02_constructor():
    """The observer is made with `with_args(**fields of the spec)()`, and a negative ch_axis is not allowed."""
    made = MXObserver.with_args(
        qscheme=("mx", "fp4_e2m1", 32, 1, "floor", "even"), dtype=torch.uint8, is_dynamic=False
    )()
    assert made.spec == pt2mx.MXSpec("fp4_e2m1", 32, 1)
    model, _ = converted(nn.Linear(64, 8), torch.randn(2, 64))
    assert [spec.axis for spec in pairs(model)] == [1, 1]


def test_trap_03_implicit_sharing():
    """Two consumers of one tensor got one observer whatever format, axis and block they asked for."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.a(x), self.b(x), x.t() @ x

    other = get_default_mx_quantization_config("mxfp4", "mxint8{16}")
    quantizer = MXQuantizer().set_global(CONFIG).set_module_name("b", other)
    model, prepared = converted(Shared(), torch.randn(64, 64), quantizer=quantizer)
    found = {(s.element.name, s.block_size, s.axis) for s in pairs(model)}
    assert found == {("fp8_e4m3", 32, 1), ("fp8_e4m3", 32, 0), ("int8", 16, 1), ("fp4_e2m1", 32, 1)}
    x = torch.randn(64, 64)
    with torch.no_grad():
        for got, want in zip(model(x), prepared(x), strict=True):
            assert torch.equal(got, want)
        want = pt2mx.fake_quantize_mx(x, "mxint8{16}") @ pt2mx.fake_quantize_mx(prepared.b.weight, "mxfp4").t()
        assert torch.equal(model(x)[1], want)


def test_trap_04_repeated_arguments():
    """Specs are keyed by node: `x @ x` and `sdpa(x, x, x)` got one for all their arguments."""

    class Repeated(nn.Module):
        def forward(self, x):
            return x @ x, nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(2, 64, 64)
    config = pt2mx.get_default_mx_quantization_config("mxfp8", "mxfp8", value_blocks="key_length")
    model, _ = converted(Repeated(), x, quantizer=MXQuantizer().set_global(config))
    rows, columns = pt2mx.fake_quantize_mx(x, "mxfp8"), pt2mx.fake_quantize_mx(x, "mxfp8", axis=-2)
    got = model(x)
    assert torch.equal(got[0], rows @ columns)
    assert torch.equal(got[1], nn.functional.scaled_dot_product_attention(rows, rows, columns))


def test_trap_05_is_dynamic():
    """`is_dynamic=True` breaks convert."""
    prepared = pt2mx.prepare_pt2e(exported(nn.Linear(8, 8), torch.randn(2, 8)), QUANTIZER)
    assert [m.is_dynamic for m in prepared.modules() if isinstance(m, MXObserver)] == [False, False]


def test_trap_06_weights_fold():
    """torchao folds its own operators only, and would fold our dequantize as a constant."""
    model, _ = converted(nn.Linear(64, 8), torch.randn(2, 64))
    state = model.state_dict()
    assert {n: (t.dtype, tuple(t.shape)) for n, t in state.items() if "weight" in n} == {
        "weight_data": (torch.uint8, (8, 32)),
        "weight_scale": (torch.uint8, (8, 2)),
    }
    (data,) = [n.args[0] for n in model.graph.nodes if n.target is ops.dequantize_mx and n.args[0].op == "get_attr"]
    assert data.target == "weight_data"


def test_trap_07_meta():
    """The passes that copy meta to quantize and dequantize nodes skip foreign ones."""
    model, _ = converted(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), torch.randn(2, 64))
    created = [n for n in model.graph.nodes if n.target in (ops.quantize_mx, ops.dequantize_mx, operator.getitem)]
    assert len(created) == 2 * 4 + 2  # activations; weights are folded
    assert all({"val", "stack_trace", "nn_module_stack"} <= n.meta.keys() for n in created)


def test_trap_08_batch_norm_folds_in_training():
    """torchao folds a trained convolution and batch norm around its own operators only, and no linear or 3-d one. Every
    kind of layer: tests/fx/test_fuse_batch_norm.py."""
    for layer, norm, shape in [
        (nn.Conv2d(32, 8, 3, bias=False), nn.BatchNorm2d(8), (2, 32, 5, 5)),
        (nn.Conv3d(32, 8, 1), nn.BatchNorm3d(8), (2, 32, 2, 2, 2)),
        (nn.Linear(32, 8), nn.BatchNorm1d(8), (6, 32)),
    ]:
        x = torch.randn(shape)
        prepared = pt2mx.prepare_qat_pt2e(exported(nn.Sequential(layer, norm).train(), x), QUANTIZER)
        prepared(x).sum().backward()
        model = pt2mx.convert_pt2e(prepared)
        with torch.no_grad():
            assert torch.equal(model(x), prepared.eval()(x))
        assert not any("batch_norm" in str(n.target) for n in model.graph.nodes)


def test_trap_09_literals_of_batch_norm_and_dropout():
    """eps and momentum became 1e-5 and 0.1, p became 0.5 (pytorch/ao#4107, #2980). In each mode, and recurrent networks
    and attention: tests/fx/test_modes.py."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, eps=0.25, momentum=0.75), nn.Dropout(0.125)).train()
    x, reference = torch.randn(8, 4, 16, 16), copy.deepcopy(model)
    prepared = pt2mx.prepare_qat_pt2e(exported(model, x), QUANTIZER)
    pt2mx.disable_fake_quant(prepared)
    for training in (True, False, True):
        prepared.train(training)
        reference.train(training)
        torch.manual_seed(0)
        want = reference(x)
        torch.manual_seed(0)
        torch.testing.assert_close(prepared(x), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prepared.state_dict()["1.running_var"], reference[1].running_var)


def test_trap_10_graphs_inside():
    """A forward under no_grad is a graph inside the graph and stayed float. Other kinds: tests/fx/test_subgraphs.py."""

    class NoGrad(nn.Linear):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    x = torch.randn(2, 64)
    model, prepared = converted(NoGrad(64, 8), x)
    assert torch.equal(model(x), prepared(x)) and "weight_data" in model.state_dict()


def test_trap_11_compiles_with_gradients_on(compiler):
    """An operator without an autograd formula fails under torch.compile where a gradient is asked for."""
    x = torch.randn(2, 64)
    model, _ = converted(nn.Linear(64, 8), x)
    assert torch.is_grad_enabled() and not any(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))


def test_trap_12_flags_do_not_break_the_graph(compiler):
    """A flag in a tensor, as torchao's fake-quantize modules have it, is a graph break for each module."""
    x = torch.randn(2, 64)
    prepared = pt2mx.prepare_qat_pt2e(exported(nn.Linear(64, 8), x), QUANTIZER)
    compiled = torch.compile(prepared, fullgraph=True, backend="aot_eager")
    quantized = compiled(x)
    torch.testing.assert_close(quantized, prepared(x))
    pt2mx.disable_fake_quant(prepared)
    torch.testing.assert_close(compiled(x), prepared(x))
    state = prepared.state_dict()
    pt2mx.enable_fake_quant(prepared)
    prepared.load_state_dict(state)
    assert not torch.allclose(prepared(x), quantized)


def test_trap_13_operators_fuse(compiler):
    """Opaque calls do not fuse with their neighbours; stale code would be served after a change of a decomposition."""
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(2, 64)
    model, _ = converted(nn.Linear(64, 8), x)
    with torch.no_grad():
        _, code = run_and_get_code(torch.compile(model), x)
    assert not any("torch.ops.pt2mx" in source for source in code)
    assert "pt2mx-" in torch.compiler.config.cache_key_tag


def test_trap_14_portable():
    """A program does not load where the operators are not registered; `make_portable` writes them out. In a process
    without pt2mx: tests/fx/test_portable.py."""
    x = torch.randn(2, 64)
    model, _ = converted(nn.Linear(64, 8), x)
    program = torch.export.export(model, (x,))
    portable = pt2mx.make_portable(program)
    assert "pt2mx" in str(program.graph) and "pt2mx" not in str(portable.graph)
    with torch.no_grad():
        assert torch.equal(portable.module()(x), model(x))


def test_trap_15_storage_dtypes(tmp_path):
    """FP4 and E8M0 dtypes fail in torch.export.save and in safetensors."""
    safetensors = import_extra("safetensors.torch", "hf")
    x = torch.randn(2, 64)
    model, _ = converted(nn.Linear(64, 8), x)
    packed = {name: t for name, t in model.state_dict().items() if name != "bias"}
    assert {t.dtype for t in packed.values()} == {torch.uint8}
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    model.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), model(x))


@pytest.mark.filterwarnings("ignore:dropout of the exported model train")  # they evaluate after prepare_pt2e
@pytest.mark.parametrize("prepare", [pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e])
def test_trap_16_no_model_is_kept_alive(prepare):
    """Caches of torch and torchao kept every prepared model."""
    x = torch.randn(2, 64)
    module = exported(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 8)), x)
    kept = []
    for _ in range(20):
        prepared = prepare(module, QUANTIZER)
        prepared(x)
        model = pt2mx.convert_pt2e(prepared)
        kept += [weakref.ref(prepared), weakref.ref(model)]
    del prepared, model
    gc.collect()
    assert not [r for r in kept if r() is not None]


def test_trap_17_several_devices():
    """torchao asserts in the middle of prepare."""
    module = exported(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8))
    module.get_submodule("1").weight = nn.Parameter(torch.zeros(8, 8, device="meta"))
    with pytest.raises(MXError, match="spans the devices cpu, meta"):
        pt2mx.prepare_pt2e(module, QUANTIZER)


@pytest.mark.filterwarnings("ignore:dropout of the exported model train")  # they evaluate after prepare_pt2e
@pytest.mark.parametrize("prepare", [pt2mx.prepare_pt2e, pt2mx.prepare_qat_pt2e])
def test_trap_18_train_and_eval(prepare):
    """They raised on exported modules and on every parent of one."""
    prepared = prepare(exported(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train(), torch.randn(2, 8)), QUANTIZER)
    for model in (prepared, pt2mx.convert_pt2e(prepared)):
        parent = nn.Sequential(model, nn.Dropout(0.5))
        assert not parent.eval()[0].training and parent.train()[0].training
        assert copy.deepcopy(parent).eval()[0].training is False


def test_trap_19_inductors_configuration_stays(run_python):
    """Importing X86InductorQuantizer changes Inductor's global configuration."""
    code = "import torch._inductor.config as c; before = c.save_config_portable(); import pt2mx; {}".format(
        "print(before == c.save_config_portable())"
    )
    assert run_python(code).split() == ["True"]


def test_trap_20_integers_and_constants():
    """Integer, bool and constant tensors got observers."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 64)

        def forward(self, tokens):
            x = self.table(tokens)
            mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
            positions = torch.cumsum(torch.ones_like(tokens), 1)
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask) + positions.unsqueeze(-1)

    tokens = torch.randint(10, (2, 8))
    model, prepared = converted(Masked(), tokens)
    observed = [n.args[0].meta["val"].dtype for n in prepared.graph.find_nodes(op="call_module") if "post" in n.target]
    assert observed == [torch.float32] * 4
    assert torch.equal(model(tokens), prepared(tokens))


def test_trap_21_hugging_face():
    """Export needs use_cache=False; Conv1D is an addmm with a weight (in, out)."""
    transformers = import_extra("transformers", "hf")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2, use_cache=False, resid_pdrop=0.0
    )
    model, tokens = transformers.GPT2Model(config).eval(), torch.randint(50, (1, 8))
    got, prepared = converted(model, tokens)
    weights = [n.args[2] for n in got.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)]
    assert len(weights) == 4 and all(n.meta["mx_spec"].axis == 0 for n in weights)
    with torch.no_grad():
        assert torch.equal(got(tokens)[0], prepared(tokens)[0])


def test_trap_22_torchvision_beside_a_cpu_torch(run_python):
    """The package index has a CUDA build of torchvision; its import next to a CPU torch fails without two schemas."""
    code = (
        "from pt2mx.extras import import_extra; print(import_extra('torchvision', 'vision').models.resnet18.__name__)"
    )
    assert run_python(code).split() == ["resnet18"]


X86 = """
import torch
from torch import nn
from torchao.quantization.pt2e.quantizer import ComposableQuantizer
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
import pt2mx

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(4, 64)
int8 = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
mx = pt2mx.MXQuantizer().set_module_name("2", pt2mx.get_default_mx_quantization_config("mxfp4", "mxfp8"))
prepared = pt2mx.prepare_pt2e(torch.export.export(model, (x,)).module(), ComposableQuantizer([mx, int8]))
prepared(x)
converted = pt2mx.convert_pt2e(prepared)
print(sorted((n, str(t.dtype)) for n, t in converted.state_dict().items() if "weight" in n))

# the MX layer sees what the int8 layer returns
linear, mxfp8 = nn.functional.linear, lambda t: pt2mx.fake_quantize_mx(t, "mxfp8")
weight, observed = converted.get_buffer("0.weight_data"), converted._scale_0
q = next(n for n in converted.graph.nodes if "quantize_per_tensor" in str(n.target))
x8 = torch.ops.quantized_decomposed.quantize_per_tensor(x, *q.args[1:])
x8 = torch.ops.quantized_decomposed.dequantize_per_tensor(x8, *q.args[1:])
first = torch.relu(linear(x8, weight.float() * observed[:, None], model[0].bias))
want = linear(mxfp8(first), pt2mx.fake_quantize_mx(model[2].weight, "mxfp4"), model[2].bias)
print(torch.equal(converted(x), want))
print(torch.allclose(torch.export.export(converted, (x,)).module()(x), want))
"""


def test_trap_23_beside_another_quantizer(run_python):
    """MX first, then X86: the other way round raises. Both fold their weights. In a process of its own: the import of
    the X86 quantizer changes Inductor's config."""
    weights, equal, exported_again = run_python(X86).splitlines()
    assert weights == str([("0.weight_data", "torch.int8"), ("2.weight_data", "torch.uint8"),
                           ("2.weight_scale", "torch.uint8")])  # fmt: skip
    assert equal == exported_again == "True"


def test_trap_24_quiet_import(run_python):
    """torchao announces CUDA extensions that a CPU machine lacks."""
    code = (
        "import io, contextlib, sys; e = io.StringIO()\n"
        "with contextlib.redirect_stderr(e), contextlib.redirect_stdout(e): import pt2mx\n"
        "print(repr(e.getvalue()))"
    )
    assert run_python(code).strip() == "''"
