"""Traps of torch.compile, files and imports for operators and models of others. The numbers continue the list of
test_traps.py."""

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXQuantizer, get_default_mx_quantization_config
from pt2mx.extras import import_extra
from tests.flow import exported
from tests.graph import namespaces

QUANTIZER = MXQuantizer().set_global(get_default_mx_quantization_config("mxfp4", "mxfp8"))


def converted(x):
    """A linear layer."""
    return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported(nn.Linear(64, 8).eval(), x), QUANTIZER))


def test_trap_11_compiles_with_gradients_on(compiler):
    """An operator without an autograd formula fails under torch.compile where a gradient is asked for."""
    x = torch.randn(2, 64)
    model = converted(x)
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


@pytest.mark.compiled
def test_trap_13_operators_fuse(compiler):
    """Opaque calls do not fuse with their neighbours; stale code would be served after a change of a decomposition."""
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(2, 64)
    model = converted(x)
    with torch.no_grad():
        _, code = run_and_get_code(torch.compile(model), x)
    assert not any("torch.ops.pt2mx" in source for source in code)
    assert "pt2mx-" in torch.compiler.config.cache_key_tag


def test_trap_14_portable():
    """A program does not load where the operators are not registered; `make_portable` writes them out. In a process
    without pt2mx: tests/fx/test_portable.py."""
    x = torch.randn(2, 64)
    model = converted(x)
    program = torch.export.export(model, (x,))
    portable = pt2mx.make_portable(program)
    assert "pt2mx" in namespaces(program.graph_module) - namespaces(portable.graph_module)
    with torch.no_grad():
        assert torch.equal(portable.module()(x), model(x))


def test_trap_15_storage_dtypes(tmp_path):
    """FP4 and E8M0 dtypes fail in torch.export.save and in safetensors."""
    safetensors = import_extra("safetensors.torch", "hf")
    x = torch.randn(2, 64)
    model = converted(x)
    packed = {name: t for name, t in model.state_dict().items() if name != "bias"}
    assert {t.dtype for t in packed.values()} == {torch.uint8}
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    model.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), model(x))


@pytest.mark.compiled
def test_trap_19_inductors_configuration_stays(run_python):
    """Importing X86InductorQuantizer changes Inductor's global configuration."""
    code = """
import torch._inductor.config as config
before = config.save_config_portable()
import pt2mx.pt2e.flow.prepare
print(before == config.save_config_portable())
"""
    assert run_python(code, fresh=True).split() == ["True"]


def test_trap_22_torchvision_with_a_cpu_torch(run_python):
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


def test_trap_23_with_another_quantizer(run_python):
    """MX first, then X86: the other way round raises. Both fold their weights. In a separate process, because the
    import of the X86 quantizer changes Inductor's config."""
    weights, equal, exported_again = run_python(X86).splitlines()
    assert weights == str([("0.weight_data", "torch.int8"), ("2.weight_data", "torch.uint8"),
                           ("2.weight_scale", "torch.uint8")])  # fmt: skip
    assert equal == exported_again == "True"


@pytest.mark.compiled
def test_trap_24_quiet_import(run_python):
    """torchao announces CUDA extensions that a CPU machine lacks, and warns."""
    code = (
        "import io, contextlib, sys, warnings; e = io.StringIO(); warnings.simplefilter('error')\n"
        "with contextlib.redirect_stderr(e), contextlib.redirect_stdout(e): import pt2mx.pt2e.flow.prepare\n"
        "print(repr(e.getvalue()))"
    )
    assert run_python(code, fresh=True).strip() == "''"
