import subprocess
import sys

import pytest

from pt2mx import MXError, cpp
from pt2mx.cpp.__main__ import main


@pytest.mark.compiled
def test_the_library_is_kept():
    path = cpp.library_path()
    assert path == cpp.library_path() and path.stat().st_mode & 0o111
    assert f'"{path}"' in cpp.cmake_lines("server") and "target_link_libraries(server" in cpp.cmake_lines("server")


@pytest.mark.compiled
def test_a_damaged_copy_is_written_again(tmp_path, monkeypatch):
    from pt2mx.cpp import library

    content = cpp.library_path().read_bytes()
    monkeypatch.setattr(library, "cache_folder", lambda: tmp_path)
    path = cpp.library_path()
    path.write_bytes(content[:100])
    assert cpp.library_path() == path and path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == ["libpt2mx_ops.so"]


@pytest.mark.compiled
def test_build_to_a_folder(tmp_path, capsys):
    assert cpp.build(tmp_path).read_bytes() == cpp.library_path().read_bytes()
    assert main(["--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'libpt2mx_ops.so'}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["libpt2mx_ops.so"]
    assert main([]) == 0
    assert capsys.readouterr().out == f"{cpp.library_path()}\n"


def test_bad_arguments(tmp_path, capsys):
    with pytest.raises(MXError, match="unknown capability 'AVX3'"):
        cpp.build(tmp_path, "AVX3")
    assert main(["--output", str(tmp_path / "nowhere")]) == 2
    assert "must be a file in a folder that exists" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_no_compiler(tmp_path):
    code = "from pt2mx.cpp.__main__ import main; print(main([]))"
    variables = {"CXX": "/no/compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert result.stdout == "2\n" and "install a C++ compiler" in result.stderr, result.stderr
