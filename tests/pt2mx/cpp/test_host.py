"""Packages in a C++ program: its outputs are Python's to the bit, and it has no Python in it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import cpp_builder
from torch.utils.cpp_extension import include_paths, library_paths

import pt2mx
from pt2mx import MXSpec, cpp
from pt2mx.pt2e.packages.compile import compile_program
from tests.compare import differing
from tests.flow import convert

EXAMPLE = Path(cpp.__file__).parent / "example"
ours = torch.ops.pt2mx


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """The example program, linked as its CMakeLists.txt does."""
    program, library = tmp_path_factory.mktemp("host") / "host", cpp.library_path()
    command = [
        *(cpp_builder.get_cpp_compiler(), "-std=c++20", "-O0", *(f"-I{path}" for path in include_paths())),
        *(str(EXAMPLE / "host.cpp"), "-o", str(program)),
        *(argument for path in library_paths() for argument in (f"-L{path}", f"-Wl,-rpath,{path}")),
        *("-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--no-as-needed", str(library), f"-Wl,-rpath,{library.parent}"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return program


def run(host, package, inputs, tmp_path, **variables):
    """The process, after it ran the package; its outputs are in tmp_path / "outputs.pt"."""
    torch.save(list(inputs), tmp_path / "inputs.pt")
    command = [str(host), str(package), str(tmp_path / "inputs.pt"), str(tmp_path / "outputs.pt")]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})


def check(host, package, inputs, tmp_path):
    """Check that the outputs of the program equal the outputs of the package in this process."""
    result = run(host, package, inputs, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    outputs = torch.load(tmp_path / "outputs.pt")
    model = torch._inductor.aoti_load_package(str(package))
    expected_outputs = model(*inputs)
    expected_outputs = expected_outputs if isinstance(expected_outputs, tuple | list) else (expected_outputs,)
    for actual, expected in zip(outputs, expected_outputs, strict=True):
        assert actual.dtype == expected.dtype and actual.stride() == expected.stride()
        assert not differing(actual, expected).any()


class Attention(nn.Module):
    """An embedding, and attention with quantized matmuls."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(100, 64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, ids):  # (B, S) -> (B, S, 64)
        x = self.table(ids)
        q, k, v = (t.unflatten(-1, (2, 32)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.norm(x + self.out(y.transpose(1, 2).flatten(2)))


def mlp():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))


def ids(batch):
    return torch.randint(0, 100, (batch, 7))


def rows(batch):
    return torch.randn(batch, 64)


def package_of(model, recipe, inputs, path):
    torch.manual_seed(0)
    shapes = ({0: torch.export.Dim("batch", max=64)},)
    converted = convert(model(), (inputs(8),), recipe, shapes=shapes)
    compile_program(torch.export.export(converted, (inputs(8),), dynamic_shapes=shapes), path)
    return path


@pytest.mark.compiled
def test_a_package_of_packed_weights(host, tmp_path):
    package = package_of(mlp, "mxfp4_weight_only", rows, tmp_path / "mlp.pt2")
    for batch in (8, 1, 50):
        check(host, package, (rows(batch),), tmp_path)
    linked = subprocess.run(["ldd", str(host)], capture_output=True, text=True).stdout
    assert "libpt2mx_ops.so" in linked and "libpython" not in linked and "libtorch_python" not in linked

    for paths in (["none", "inputs.pt", "o"], [str(package), "none", "o"]):
        result = subprocess.run([str(host), *paths], capture_output=True, text=True, cwd=tmp_path)
        assert (result.returncode, result.stderr) == (1, "host: cannot read none\n")
    result = subprocess.run(
        [str(host), str(package), "inputs.pt", "/dev/full"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (result.returncode, result.stderr) == (1, "host: cannot write /dev/full\n")

    # what the machine code would read beyond its end
    for wrong in (rows(65), rows(8).double(), torch.ones(8, 65), torch.ones(8)):
        result = run(host, package, (wrong,), tmp_path)
        assert result.returncode == 1 and result.stderr.startswith("host: input 0 is CPU"), result.stderr
        assert "the package takes CPUFloatType with sizes from and to [(0, 64), (64, 64)]" in result.stderr
    result = run(host, package, (rows(8), rows(8)), tmp_path)
    assert (result.returncode, result.stderr) == (1, "host: the package takes 1 tensors\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "recipe", "inputs"),
    [(mlp, "mxfp8", rows), (mlp, "mxfp4", rows), (Attention, "mxfp8", ids), (Attention, "mxfp4_weight_only", ids)],
)
def test_packages(host, model, recipe, inputs, tmp_path):
    package = package_of(model, recipe, inputs, tmp_path / "model.pt2")
    for batch in (8, 1, 40):
        check(host, package, (inputs(batch),), tmp_path)


class Operators(nn.Module):
    """Each of the operators that packages call."""

    def forward(self, x, seed, weight, experts, offs, cache):
        rotated = ours.rotated_fake_quantize_mx(ours.hadamard(x, 32, -1), 64, "fp8_e4m3", 32, "mse", "half_away")
        y = ours.linear_mx(rotated, weight[1], weight[0], None, "fp4_e2m1", 32, 64)
        grouped = ours.grouped_linear_mx(x, experts[1], experts[0], offs, "fp6_e2m3", 32)
        query = x.reshape(1, 4, -1, 64)
        codes = (cache[1], cache[0]) * 2
        return y, grouped, ours.attention_mx(query, *codes, "int8", 32, 64), ours.random_bits(seed, [2, 5])


@pytest.mark.compiled
def test_all_operators(host, tmp_path):
    torch.manual_seed(0)
    weight = pt2mx.quantize_mx(torch.randn(16, 64), MXSpec("fp4_e2m1"))
    experts = pt2mx.quantize_mx(torch.randn(3, 16, 64), MXSpec("fp6_e2m3"))
    cache = pt2mx.quantize_mx(torch.randn(1, 2, 9, 64), MXSpec("int8"))
    inputs = (torch.randn(8, 64), torch.tensor(7), weight, experts, torch.tensor([2, 2, 8], dtype=torch.int32), cache)
    package = tmp_path / "operators.pt2"
    torch._inductor.aoti_compile_and_package(torch.export.export(Operators(), inputs), package_path=str(package))
    flat = torch.utils._pytree.tree_leaves(inputs)
    assert run(host, package, flat, tmp_path).returncode == 0
    for actual, expected in zip(torch.load(tmp_path / "outputs.pt"), Operators()(*inputs), strict=True):
        assert not differing(actual, expected).any()


@pytest.mark.compiled
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_the_cmake_example(tmp_path):
    for lines in ((EXAMPLE / "CMakeLists.txt").read_text(), _BY_LINES + cpp.cmake_lines()):
        source = tmp_path / "source"
        shutil.copytree(EXAMPLE, source, dirs_exist_ok=True)
        (source / "CMakeLists.txt").write_text(lines)
        build = tmp_path / "build"
        shutil.rmtree(build, ignore_errors=True)
        options = [f"-DPT2MX_OPS={cpp.library_path()}", f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]
        for command in (["cmake", "-S", str(source), "-B", str(build), *options], ["cmake", "--build", str(build)]):
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, result.stdout + result.stderr
        result = subprocess.run([str(build / "host")], capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (2, "usage: host PACKAGE INPUTS OUTPUTS\n")


_BY_LINES = """
cmake_minimum_required(VERSION 3.18)
project(host LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
add_executable(host host.cpp)
"""
