"""Inductor knows the operators whatever was imported first; compiled before the import: `test_inductor.py`."""

import pytest
import torch

import pt2mx


class Quantized(torch.nn.Module):
    def forward(self, x):
        return pt2mx.fake_quantize_mx(torch.relu(x), "mxfp4") * 2


KNOWN = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import torch
from torch._inductor import decomposition
print(torch.ops.pt2mx.fake_quantize_mx.default in decomposition.select_decomp_table())
print("torch._inductor.lowering" in sys.modules)
from torch._inductor import lowering
print(torch.ops.pt2mx.linear_mx.default in lowering.lowerings, torch.ops.pt2mx.dense.default in lowering.lowerings)
"""


@pytest.mark.parametrize(
    ("modules", "lowers"),
    [
        (["pt2mx"], False),
        pytest.param(["pt2mx", "torch._inductor.kernel.mm"], True, marks=pytest.mark.slow),
        pytest.param(["torch._inductor.decomposition", "pt2mx"], False, marks=pytest.mark.slow),
        pytest.param(["torch._inductor.lowering", "pt2mx"], True, marks=pytest.mark.slow),
        pytest.param(
            ["torch._inductor.ir", "pt2mx", "torch._inductor.fx_passes.joint_graph"], True, marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.compiled_cases("modules0-False")
def test_tables_whatever_was_imported_first(modules, lowers, run_python):
    """The decompositions are there with Inductor's own, before its lowerings have been imported."""
    assert run_python(KNOWN, modules, fresh=True).split() == ["True", str(lowers), "True", "True"]


@pytest.mark.compiled  # the first case above checks the tables, test_package.py packages of operators in general
def test_aotinductor_of_a_program_that_was_loaded(run_python, tmp_path):
    """No fake kernel ran in that process before."""
    x = torch.randn(4, 64)
    torch.export.save(torch.export.export(Quantized(), (x,)), tmp_path / "program.pt2")
    code = """
import sys, zipfile, torch, pt2mx
program = torch.export.load("program.pt2")
print("torch._inductor.lowering" in sys.modules)
torch._inductor.aoti_compile_and_package(program, package_path="package.pt2")
package = zipfile.ZipFile("package.pt2")
sources = [package.read(name).decode() for name in package.namelist() if name.endswith(".cpp")]
print(len(sources) > 0, any("pt2mx::" in source or "pt2mx." in source for source in sources))
"""
    assert run_python(code, cwd=tmp_path, fresh=True).split() == ["False", "True", "False"]
    package = torch._inductor.aoti_load_package(str(tmp_path / "package.pt2"))
    assert torch.equal(package(x), Quantized()(x))


@pytest.mark.compiled  # the blocks of README.md compile in fresh processes, too
def test_a_compiled_first_call(run_python):
    code = """
import torch, pt2mx
from torch._inductor.utils import run_and_get_code
x = torch.randn(2, 64)
y, (code,) = run_and_get_code(torch.compile(lambda x: pt2mx.fake_quantize_mx(x, "mxfp4") + 1), x)
print("torch.ops.pt2mx" in code, torch.equal(y, pt2mx.fake_quantize_mx(x, "mxfp4") + 1))
"""
    assert run_python(code, fresh=True).split() == ["False", "True"]
