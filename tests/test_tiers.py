"""What `tests/conftest.py` does for a run: the cases of each tier, the slowest functions, files that are left."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tests.conftest import keep_part
from tests.fresh_process import run_program

ROOT = Path(__file__).parent.parent
README = (ROOT / "tests/README.md").read_text()

RUN = """
import os
import pytest
os.environ["HOME"] = os.path.abspath("home")
options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-q", "-W", "ignore"]
options += ["-m", "not slow and not compiled"]
print("status", int(pytest.main(options)))
"""


@pytest.fixture
def run(tmp_path):
    """A function that runs a file of tests with our hooks, in a home of its own, and returns status and output."""
    (tmp_path / "home").mkdir()

    def call(code):
        (tmp_path / "test_it.py").write_text(code)
        finished = run_program(RUN, "-c", tmp_path)
        assert finished.status == 0, finished.err
        out, _, status = finished.out.rpartition("status ")
        return int(status), out + finished.err

    return call


def test_cases_of_a_tier_are_left_out(run):
    code = """
import pytest

@pytest.mark.slow_cases("a*")
@pytest.mark.compiled_cases("b")
@pytest.mark.parametrize("name", ["a1", "a2", "b", "c"])
def test_some(name):
    assert name == "c"

@pytest.mark.slow_except("a1", "b")
@pytest.mark.compiled_except("b", "a2")
@pytest.mark.parametrize("name", ["a1", "a2", "b"])
def test_others(name):
    assert name == "b"
"""
    status, out = run(code)
    assert status == 0 and "2 passed, 5 deselected" in out, out


def test_the_diagonal_of_a_grid_has_each_value(run):
    status, out = run("""
import pytest

@pytest.mark.diagonal
@pytest.mark.parametrize("x", ["a", "b"])
@pytest.mark.parametrize(("y", "z"), [(1, 0), (2, 0), (3, 0)])
def test_some(x, y, z):
    assert (x, y) in (("a", 1), ("b", 2), ("a", 3))

@pytest.mark.diagonal
@pytest.mark.slow_cases("2-b")
@pytest.mark.parametrize("x", ["a", "b"])
@pytest.mark.parametrize("y", [1, 2])
def test_where_the_diagonal_is_slow(x, y):
    assert (x, y) != ("b", 2)
""")
    assert status == 0 and "6 passed, 4 deselected" in out, out


def test_a_name_of_no_case_is_an_error(run):
    status, out = run("""
import pytest

@pytest.mark.compiled_except("d")
@pytest.mark.parametrize("name", ["a"])
def test_some(name):
    pass
""")
    assert status == pytest.ExitCode.USAGE_ERROR and "test_some has no case d" in out, out


def test_a_run_that_leaves_a_file_fails(run, tmp_path):
    status, out = run("""
import tempfile
from pathlib import Path

def test_leaves():
    tempfile.mkdtemp("left")

def test_removes():
    with tempfile.TemporaryDirectory():
        pass

def test_leaves_at_home():
    (Path.home() / "left.txt").touch()
""")
    assert status == 1 and "3 passed, 1 error" in out and "ERROR test_it.py::test_leaves -" in out, out
    assert f"The tests left files: {tmp_path}/home/left.txt" in out, out


def test_the_slowest_functions_are_printed(run):
    status, out = run("""
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    report.duration = 10.0

@pytest.fixture(autouse=True, scope="session")
def _clock(request):
    request.config.pluginmanager.register(__import__("sys").modules[__name__])

@pytest.mark.parametrize("name", ["a", "b"])
def test_often(name):
    pass

def test_once():
    pass
""")
    assert status == 0, out
    assert re.search(
        r"^  60.0 s  test_it.py::test_often\n  30.0 s  test_it.py::test_once\n  90.0 s  all 2 f", out, re.M
    ), out


@pytest.mark.compiled  # which collects a third of the suite
def test_the_representatives_of_the_table_run():
    """Each mechanism has a test that runs by default, or among the compiled ones if the table says so."""
    table = README.partition("## Mechanisms")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 20
    named = [re.findall(r"`([\w/]+\.py)::(\w+)`( \(compiled\))?", representatives) for _, representatives, _ in rows]
    for compiled, marks in (("", "not slow and not compiled and not cuda"), (" (compiled)", "compiled and not slow")):
        wanted = {f"tests/{file}::{name}" for row in named for file, name, tier in row if tier == compiled}
        files = sorted({name.partition("::")[0] for name in wanted})
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            marks,
            *files,
        ]
        collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        missing = wanted - {line.partition("[")[0] for line in collected.splitlines()}
        assert not missing, (marks, missing)


def test_precompiled_headers_of_inductor_outlive_this_process():
    headers, own = Path(default_cache_dir()).resolve(), Path(tempfile.gettempdir()).resolve()
    assert headers.is_dir() and not headers.is_relative_to(own)


def test_each_test_is_in_one_part():
    names = [f"tests/test_a.py::test_b[{i}]" for i in range(800)]
    kept = []
    for i in range(8):
        items, left_out = [SimpleNamespace(nodeid=name) for name in names], []
        hook = SimpleNamespace(pytest_deselected=lambda items, all=left_out: all.extend(items))
        keep_part(SimpleNamespace(getoption=lambda _, i=i: f"{i}/8", hook=hook), items)
        assert 70 < len(items) < 130 and len(items) + len(left_out) == len(names)
        kept += [item.nodeid for item in items]
    assert sorted(kept) == sorted(names)
