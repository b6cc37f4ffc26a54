"""The libraries of a wheel: they are loaded where there is no compiler, and only for the sources that they are of."""

import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from pt2mx import MXError
from pt2mx.kernels.cpu import build as cpu_build
from pt2mx.kernels.cpu import prebuilt

ROOT = Path(__file__).parents[4]

#: quantizes in a process without a compiler, and prints the path of the library
_QUANTIZE = """
import sys, warnings
from pathlib import Path
import torch
import pt2mx
from pt2mx.kernels import reference
from pt2mx.kernels.cpu import build
warnings.simplefilter("error")
build.LIBRARIES = Path(sys.argv[1])
x, spec = torch.randn(4, 64), pt2mx.MXSpec("fp4_e2m1", axis=1)
assert torch.equal(pt2mx.fake_quantize_mx(x, spec), reference.fake_quantize(x, spec))
print(build.load()[0]._name)
"""
#: generates in a process without a compiler, and prints the path of the library and the tokens
_GENERATE = """
import warnings
import torch, transformers
from pt2mx import LanguageModel, MXQuantizer, quantize_language_model
from pt2mx.kernels.cpu import build
warnings.filterwarnings("error", "the C.. kernels")
sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=128)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, eos_token_id=None)).eval()
quantize_language_model(model, MXQuantizer.from_recipe("mxfp4_weight_only")).save_pretrained("model")
tokens = LanguageModel.from_pretrained("model").generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False)
print(build.load()[0]._name, tokens.shape[1])
"""


@pytest.fixture(scope="module")
def library():
    """The bytes of the library of this processor; where no cache can be written, it is built here."""
    return cpu_build.use_built("cpu", cpu_build.SOURCES, cpu_build.HEADERS, Path.read_bytes)


@pytest.fixture
def libraries(library, tmp_path, monkeypatch):
    """Return a folder with the library of this processor, as a wheel has it, where no library can be built."""

    def no_compiler(*arguments):
        raise RuntimeError("no compiler")

    (tmp_path / cpu_build.library_name(torch.backends.cpu.get_cpu_capability())).write_bytes(library)
    monkeypatch.setattr(cpu_build, "LIBRARIES", tmp_path)
    monkeypatch.setattr(cpu_build, "compile_library", no_compiler)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path


def without_compiler(folder: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "PATH")}
    return kept | {"PATH": str(folder / "nothing"), "TORCH_EXTENSIONS_DIR": str(folder / "cache")} | more


def test_a_library_is_loaded_and_not_built(libraries):
    (path,) = libraries.glob("*.so")
    assert cpu_build._library()._name == str(path)


def test_edited_sources_are_built(libraries, tmp_path, monkeypatch):
    source = tmp_path / "more.cpp"
    source.write_text("")
    monkeypatch.setattr(cpu_build, "SOURCES", (*cpu_build.SOURCES, str(source)))
    with pytest.raises(RuntimeError, match="no compiler"):
        cpu_build._library()


def test_a_library_that_does_not_load_is_built(libraries):
    (path,) = libraries.glob("*.so")
    path.write_text("no library")
    with pytest.raises(RuntimeError, match="no compiler"):
        cpu_build._library()


@pytest.mark.compiled
def test_a_process_without_a_compiler(libraries):
    (path,) = libraries.glob("*.so")
    command = [sys.executable, "-c", _QUANTIZE, str(libraries)]
    done = subprocess.run(command, env=without_compiler(libraries), capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout.strip()) == (0, str(path)), done.stderr


@pytest.mark.parametrize(
    ("names", "tag"),
    [
        ((), "manylinux_2_17_x86_64"),
        (("GLIBC_2.2.5", "GLIBC_2.14"), "manylinux_2_17_x86_64"),
        (("GLIBC_2.2.5", "GLIBC_2.27", "GLIBC_2.9", "GLIBCXX_3.4"), "manylinux_2_27_x86_64"),
    ],
)
def test_the_tag_names_the_newest_glibc(tmp_path, names, tag):
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    old.write_bytes(b"\0GLIBC_2.3\0")
    new.write_bytes("\0".join(["", *names, ""]).encode())
    assert prebuilt.platform_tag([old, new]) == tag


def test_one_library_for_each_instruction_set(tmp_path, monkeypatch, capsys):
    calls = {}
    monkeypatch.setattr(cpu_build, "compile_library", lambda compiler, flags, path: calls.update({path.name: flags}))
    monkeypatch.setattr(prebuilt, "platform_tag", lambda paths: [path.name for path in paths])
    prebuilt.main([str(tmp_path / "libraries")])
    avx2, avx512 = (cpu_build.library_name(name) for name in ("AVX2", "AVX512"))
    assert capsys.readouterr().out == f"{[avx2, avx512]}\n" and set(calls) == {avx2, avx512}
    assert "-mavx2" in calls[avx2] and "-mavx512f" not in calls[avx2] and "-mavx512f" in calls[avx512]
    assert all(set(cpu_build.SOURCES) < set(flags) for flags in calls.values())


def test_errors(tmp_path, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("g++ failed: no such file")

    monkeypatch.setattr(cpu_build, "compile_library", fails)
    with pytest.raises(MXError, match=r"g\+\+ failed"):
        prebuilt.build_libraries(tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(MXError, match="on Linux aarch64: allowed is Linux x86_64"):
        prebuilt.build_libraries(tmp_path)


@pytest.mark.slow
def test_a_wheel_where_there_is_no_compiler(tmp_path):
    environment = os.environ | {"PYTHONPATH": ""}
    # `-o`: nothing is installed into the environment of the tests
    command = ["make", "wheel", "-o", f"{sys.prefix}/.installed", f"VENV={sys.prefix}", f"DIST={tmp_path}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stem.rpartition("-")[2] == "manylinux_2_27_x86_64"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    environment = without_compiler(tmp_path, PYTHONPATH=str(tmp_path / "installed"))
    command = [sys.executable, "-c", _GENERATE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    path, count = done.stdout.split()
    assert Path(path).parent == tmp_path / "installed/pt2mx/kernels/cpu/libraries" and count == "8"
