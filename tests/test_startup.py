"""What `import pt2mx` leaves for later, and that it is there when it is needed. Each in a process with torch alone."""

from pathlib import Path

import pytest
import torch

import pt2mx

STUB = Path(pt2mx.__file__).with_suffix(".pyi")

#: what takes seconds to import; `import torch` brings none of it
HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx", "torch.ao.quantization")

STARTED = """
import sys
import torch
before = set(sys.modules)

def brought(after):
    new = {{name for name in sys.modules if name not in before}}
    others = {{name.partition(".")[0] for name in new}} - sys.stdlib_module_names - {{"torch", "pt2mx"}}
    heavy = {{name for name in new if name.startswith({heavy})}}
    print(after, "brought", sorted(others), sorted(heavy))

import pt2mx
brought("import")
from pt2mx.pt2e.cli.command import main
for argument in ("--version", "--help", "formats"):
    try:
        assert main([argument]) == 0
    except SystemExit:
        pass
    brought(argument)
"""


def test_nothing_heavy_is_imported(run_python):
    """In one process: what a command brings is there after the later ones, too."""
    printed = run_python(STARTED.format(heavy=HEAVY), fresh=True).splitlines()
    for start in ("import", "--version", "--help", "formats"):
        assert f"{start} brought [] []" in printed, printed


def test_a_model_of_a_folder_brings_no_code_of_models(run_python):
    """transformers' base class of models brings torchvision's and scipy's parts, too."""
    code = """
import sys
import pt2mx.pt2e.cli.generate, pt2mx.pt2e.language.language_model
print([name in sys.modules for name in ("transformers.generation.utils", "transformers.modeling_utils", "scipy")])
"""
    assert run_python(code, fresh=True).splitlines()[-1] == "[True, False, False]"


WITHOUT_EXTRAS = """
import importlib, sys
for name in {extras}:
    sys.modules[name] = None
from pt2mx import MXError
from pt2mx.pt2e.cli.command import COMMANDS
for module in sorted({{function.partition(":")[0] for function, _ in COMMANDS.values()}}):
    try:
        importlib.import_module(module)
    except MXError as error:
        assert "is not installed: pip install 'pt2mx[" in str(error), error
"""


def test_each_command_starts_without_optional_packages(run_python):
    extras = ("onnx", "onnxscript", "onnxruntime", "openvino", "executorch", "lm_eval", "gguf", "jax", "tensorflow")
    extras += ("torchvision", "transformers", "safetensors", "compressed_tensors", "PIL", "matplotlib")
    assert run_python(WITHOUT_EXTRAS.format(extras=extras)) == ""


@pytest.mark.compiled
def test_the_parts_are_reached_as_attributes(run_python):
    code = """
import pt2mx
print(pt2mx.fx.lower.lower_to_inductor is pt2mx.lower_to_inductor)
print(pt2mx.pt2e.quantizer.quantizer.MXQuantizer is pt2mx.MXQuantizer)
print(pt2mx.tensor.MXTensor is pt2mx.MXTensor, pt2mx.torchmx.MXConfig is pt2mx.MXConfig)
from pt2mx import *
print(all(name in globals() for name in pt2mx.__all__))
"""
    assert set(run_python(code, fresh=True).split()) == {"True"}


def test_the_stub_names_each_public_name_once():
    names = [line.split(" as ")[1] for line in STUB.read_text().splitlines() if line.startswith("from ")]
    assert sorted(names) == pt2mx.__all__ == dir(pt2mx) and len(set(names)) == len(names) == 90


@pytest.mark.compiled
def test_checkpoints_of_a_process_that_knows_the_operators_alone(run_python, tmp_path):
    """A plain checkpoint brings no torchao; one with MXTensors, both kinds of them, loads with weights_only."""
    tensors = {
        "core": pt2mx.MXTensor.to_mx(torch.ones(2, 64), "mxfp4"),
        "torchmx": pt2mx.torchmx.MXTensor.to_mx(torch.ones(2, 64), pt2mx.dtypes.float4_e2m1, 32),
    }
    torch.save(tensors, tmp_path / "mx.pt")
    torch.save({"plain": torch.ones(2)}, tmp_path / "plain.pt")
    code = """
import sys, torch, pt2mx
torch.load("plain.pt", weights_only=True)
print("torchao" in sys.modules)
for name, x in torch.load("mx.pt", weights_only=True).items():
    print(name, type(x).__module__, bool((x.to_dtype() == 1).all()))
"""
    assert run_python(code, cwd=tmp_path, fresh=True).splitlines() == [
        "False",
        "core pt2mx.tensor.mx_tensor True",
        "torchmx pt2mx.torchmx.mx_tensor True",
    ]


@pytest.mark.compiled
def test_a_late_name_is_reached_while_dynamo_traces(run_python):
    code = """
import torch, pt2mx
x = torch.randn(2, 64)
y = torch.compile(lambda x: pt2mx.MXTensor.to_mx(x, "mxfp4").to_dtype() + 1, fullgraph=True, backend="aot_eager")(x)
print(torch.equal(y, pt2mx.fake_quantize_mx(x, "mxfp4") + 1))
"""
    assert run_python(code, fresh=True).split() == ["True"]


def test_dead_code_elimination_knows_what_writes_before_the_flow_is_reached(run_python):
    code = """
import sys, torch, pt2mx
from torch._functorch import predispatch
graph = torch.fx.Graph()
graph.call_function(predispatch.lazy_load_decompositions)
graph.call_function(torch.ops.higher_order.wrap_with_set_grad_enabled, (False, None))
print(graph.eliminate_dead_code(), "torchao" in sys.modules)
"""
    assert run_python(code, fresh=True).split() == ["False", "False"]


@pytest.mark.slow  # without circles of imports, which test_package.py looks for, any order will do
def test_any_module_of_the_flow_may_be_imported_first(run_python):
    """Which one a program reaches first is up to it."""
    code = """
import importlib, os, sys
from pathlib import Path
import torch, torchao
import pt2mx
from pt2mx import fx, pt2e
names = []
for package in (fx, pt2e):
    folder = Path(package.__file__).parent
    files = (file.relative_to(folder).with_suffix("") for file in folder.rglob("*.py"))
    names += [".".join((package.__name__, *file.parts)) for file in files if file.name != "__init__"]
assert not set(names) & set(sys.modules)
for name in names:  # operators are registered once a process
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except pt2mx.MXError as error:
            if "is not installed: pip install" not in str(error):
                raise
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} cannot be the first")
print(len(names) > 50)
"""
    assert run_python(code, fresh=True).split() == ["True"]


@pytest.mark.compiled
def test_reload(run_python):
    code = (
        "import importlib, pt2mx; importlib.reload(pt2mx); import torch._inductor.lowering; print(pt2mx.parse('mxfp4'))"
    )
    assert run_python(code, fresh=True).split() == ["mxfp4_e2m1{32}"]
