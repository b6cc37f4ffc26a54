"""The C++ library: a damaged file of its cache is built again, not loaded; sizes of structures; headers."""

import ctypes
import os
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._inductor import config, cpp_builder

from pt2mx.kernels.cpu import build as cpu_build
from pt2mx.kernels.cpu import calls
from tests.headers import errors


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return the bytes of a library: that of this process, or a new one where the process has no cache to keep it."""
    path = Path(cpu_build.load()[0]._name)
    if path.exists():
        return path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("cache")))
        return Path(cpu_build._library()._name).read_bytes()


@pytest.fixture
def cache(tmp_path, monkeypatch, library):
    """Return an empty cache and the list of builds; each build copies a library."""
    builds = []

    def build(compiler, flags, path):
        builds.append(path)
        path.write_bytes(library)

    monkeypatch.setattr(cpu_build, "compile_library", build)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path / "pt2mx", builds


def has_all_functions(library: ctypes.CDLL) -> bool:
    return all(hasattr(library, name) for name in calls.FUNCTIONS)


def written_anew(path: Path) -> None:
    """Replace the file: this process has loaded the old one, which must not change."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def another_machine(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[18:20] = struct.pack("<H", 0xB7 if content[18] != 0xB7 else 0x3E)  # of the ELF header: AArch64 or x86-64
    path.write_bytes(content)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("nothing"))


_DAMAGES = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-100] + bytes(100)),
    "text": lambda path: path.write_text("no library"),
    "another library": lambda path: path.write_bytes(Path(cpu_build.torch._C.__file__).read_bytes()),
    "another machine's": another_machine,
    "a folder": folder,
    "a link to nothing": link_to_nothing,
}


@pytest.mark.parametrize("damage", _DAMAGES.values(), ids=_DAMAGES)
def test_what_is_damaged_is_built_again(cache, damage):
    where, builds = cache
    assert has_all_functions(cpu_build._library()) and len(builds) == 1
    (path,) = where.iterdir()
    good = path.read_bytes()
    written_anew(path)
    damage(path)
    assert has_all_functions(cpu_build._library()) and len(builds) == 2
    assert list(where.iterdir()) == [path] and path.read_bytes() == good
    assert has_all_functions(cpu_build._library()) and len(builds) == 2


def test_a_sound_file_that_does_not_load_is_left_alone(cache):
    """A library of another machine that shares the cache, or a folder from which nothing may be executed."""
    where, builds = cache
    cpu_build._library()
    (path,) = where.iterdir()
    written_anew(path)
    another_machine(path)
    content = path.read_bytes()
    key = path.stem.rpartition("-")[0]
    other = path.rename(path.with_name(f"{key}-{cpu_build._digest(content)}.so"))
    assert has_all_functions(cpu_build._library()) and len(builds) == 2
    assert set(where.iterdir()) == {path, other} and other.read_bytes() == content
    assert has_all_functions(cpu_build._library()) and len(builds) == 2


@pytest.mark.parametrize("what", ["a file", "a full folder", "a full disk"])
def test_a_cache_that_cannot_be_written(cache, what, monkeypatch):
    where, builds = cache
    if what == "a file":
        where.write_text("no folder")
    elif what == "a full disk":
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    else:  # a folder with the library's name
        cpu_build._library()
        (path,) = where.iterdir()
        folder(path)
        (path / "kept").write_text("")
        builds.clear()
    for count in (1, 2):
        assert has_all_functions(cpu_build._library()) and len(builds) == count
    assert not list(where.glob(".*"))
    assert not any(path.exists() for path in builds), "the folder of a build is removed"


def test_sources_that_change_while_they_are_compiled(cache, tmp_path, monkeypatch):
    """The cache keeps no library of newer sources under the key of older ones."""
    where, builds = cache
    source, build = tmp_path / "a.cpp", cpu_build.compile_library
    source.write_text("old")

    def build_and_edit(compiler, flags, path):
        build(compiler, flags, path)
        source.write_text("new")

    monkeypatch.setattr(cpu_build, "compile_library", build_and_edit)
    kept = cpu_build.use_built("name", (str(source),), (), lambda path: path)
    assert len(builds) == 2 and list(where.iterdir()) == [kept]
    assert cpu_build.use_built("name", (str(source),), (), lambda path: path) == kept and len(builds) == 2


def test_without_a_compiler_the_cache_is_used(cache, monkeypatch):
    where, builds = cache
    with config.patch({"cpp.cxx": ("no-compiler",)}), pytest.raises(RuntimeError, match="there is no compiler: "):
        cpu_build._library()
    assert has_all_functions(cpu_build._library()) and len(builds) == 1
    with config.patch({"cpp.cxx": ("no-compiler",)}):
        assert has_all_functions(cpu_build._library()) and len(builds) == 1 and len(list(where.iterdir())) == 1
    monkeypatch.setattr(cpp_builder, "get_compiler_version_info", lambda compiler: "another version")
    assert has_all_functions(cpu_build._library()) and len(builds) == 2, "a compiler builds its own"


def test_at_the_same_time(cache):
    where, builds = cache
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda _: has_all_functions(cpu_build._library()), range(16)))
    assert len(list(where.iterdir())) == 1 and 1 <= len(builds) <= 16


def test_structures_have_the_fields_of_the_header(tmp_path):
    """The offset of each field, from the compiler."""
    fields = [(name, field) for name, type in calls.STRUCTURES.items() for field, _ in type._fields_]
    offsets = "".join(f'  printf("%zu ", offsetof({name}, {field}));\n' for name, field in fields)
    sizes = "".join(f'  printf("%zu ", sizeof({name}));\n' for name in calls.STRUCTURES)
    includes = '#include <cstddef>\n#include <cstdio>\n#include "calls.h"\n'
    (tmp_path / "print.cpp").write_text(f"{includes}int main() {{\n{offsets}{sizes}}}\n")
    command = [cpp_builder.get_cpp_compiler(), f"-I{Path(cpu_build.SOURCES[0]).parent}", "print.cpp", "-o", "print"]
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "print"], capture_output=True, check=True).stdout
    expected = [getattr(calls.STRUCTURES[name], field).offset for name, field in fields]
    expected += map(ctypes.sizeof, calls.STRUCTURES.values())
    assert list(map(int, printed.split())) == expected


def test_a_header_that_does_not_compile_alone_is_reported(tmp_path):
    """`make lint` compiles all of them."""
    header, floats = tmp_path / "header.h", Path(cpu_build.HEADERS[0]).with_name("floats.h")
    header.write_text("#pragma once\ninline i64 twice(i64 n) { return 2 * n; }\n")
    (error,) = errors([header], ["DEFAULT"])
    assert "header.h" in error and "i64" in error
    header.write_text(f'#pragma once\n#include "{floats}"\ninline i64 one = 1;\n')
    assert errors([header], ["DEFAULT"]) == []
