import json
import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec

import pytest

from pt2mx.pt2e.cli import doctor
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.cli.doctor import FailedImport, clean_imports
from pt2mx.pt2e.cli.doctor_checks import CHECKS, Check, NotNeeded


def fails(error):
    def look():
        raise error

    return look


@pytest.fixture
def check(monkeypatch, capsys):
    """Run the command with some checks; return its status, the row of the first check, and the lines of text."""

    def run(*checks):
        monkeypatch.setattr(doctor, "CHECKS", {"group": checks})
        status = main(["doctor", "--json"])
        result = json.loads(capsys.readouterr().out)
        assert main(["doctor"]) == status and result["flow_can_run"] == (status == 0)
        return status, result["checks"][0], capsys.readouterr().out.splitlines()

    return run


def test_what_is_there(check):
    status, row, lines = check(Check("g++", lambda: "12.2", "speed", "apt-get install g++"))
    assert status == 0 and (row["status"], row["found"], row["mend"]) == ("ok", "12.2", None)
    assert lines[1].split() == ["ok", "g++", "12.2"] and lines[2] == "the flow can run; nothing of 1 missing or broken"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'x.y'", name="x.y"), "x is not installed"),
        (OSError("libx.so:\n  cannot open shared object file"), "libx.so: cannot open shared object file"),
        (RuntimeError("1.0 is older than 2.11: pip install x"), "1.0 is older than 2.11"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (RuntimeError("long " * 100), ("long " * 40) + " ..."),
    ],
)
def test_what_is_missing_or_broken_comes_with_the_command_that_mends_it(error, reason, check):
    status, row, lines = check(Check("x", fails(error), "speed", "pip install x"))
    assert status == 0 and (row["status"], row["found"], row["mend"]) == ("missing", reason, "pip install x")
    assert lines[2].strip() == "for speed: pip install x" and lines[-1] == "the flow can run; 1 of 1 missing or broken"


def test_without_what_the_flow_needs_the_status_is_1(check):
    status, row, lines = check(Check("x", fails(ImportError("broken")), "the flow", "pip install x", needed=True))
    assert status == 1 and row["needed"] and lines[-1] == "the flow cannot run; 1 of 1 missing or broken"


def test_what_is_of_no_use_here_is_not_missing(check):
    status, row, lines = check(Check("GPU", fails(NotNeeded("no GPU")), "speed", "buy one"))
    assert status == 0 and (row["status"], row["mend"]) == ("not needed", None)
    assert lines[-1] == "the flow can run; nothing of 1 missing or broken"


def test_what_is_installed_and_does_not_import_is_broken(check, monkeypatch):
    def broken(module):
        raise FailedImport(f"`import {module}` fails")

    monkeypatch.setattr(doctor, "_import", broken)
    status, row, lines = check(Check("x", lambda: "1.0", "speed", "pip install x", imports={"x.y": "x-y"}))
    mend = "pip install --force-reinstall x-y"
    assert status == 0 and (row["status"], row["found"], row["mend"]) == ("broken", "`import x.y` fails", mend)
    assert lines[2].strip() == f"for speed: {mend}" and lines[-1] == "the flow can run; 1 of 1 missing or broken"


def test_what_fails_without_torch_is_unknown(check, monkeypatch):
    """Without torch the failure of another check means nothing, unless a package is not installed."""

    def broken(module):
        raise FailedImport(f"`import {module}` fails: ImportError: libtorch.so")

    monkeypatch.setattr(doctor, "_import", broken)
    checks = [
        Check("torch", lambda: "2.13", "the flow", "pip install torch", imports={"torch": "torch"}),
        Check("x", lambda: "1.0", "speed", "pip install x", imports={"x": "x"}),
        Check("g++", fails(ImportError("libtorch.so")), "speed", "apt-get install g++"),
        Check("y", fails(PackageNotFoundError("y")), "speed", "pip install y"),
        Check("z", lambda: "1.0", "speed", "pip install z"),
    ]
    expected = ["broken", "unknown", "unknown", "missing", "ok"]
    _, torch, lines = check(*checks)
    assert torch["mend"] == "pip install --force-reinstall torch"
    assert lines[-1] == "the flow can run; 2 of 5 missing or broken"
    assert [line.split()[0] for line in lines if line[0].isalpha()][1:-1] == expected


def test_here(capsys, monkeypatch):
    """A slow test below imports the modules, which takes seconds."""
    imported: list[str] = []
    monkeypatch.setattr(doctor, "_import", imported.append)
    assert main(["doctor", "--json"]) == 0
    result = {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert list(result) == [check.name for checks in CHECKS.values() for check in checks]
    assert all(row["status"] == "ok" for row in result.values() if row["needed"])
    assert {"torch", "torchao", "yaml", "torchvision", "transformers.modeling_utils", "jax"} <= set(imported)
    assert len(imported) == len(set(imported))


MODULES = {
    "whole": "print('an import that prints')",
    "prints_and_fails": "print('x'); raise RuntimeError('operator x::nms\\n  does not exist')",
    "lacks": "import not_there_at_all",
    "exits": "raise SystemExit(3)",
    "crashes": "import os; os.abort()",
    "unicode": "raise ValueError('é')",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_each_module_is_imported_in_a_process_of_its_own(modules):
    with clean_imports(MODULES) as imports:
        result = {name: imports[name].exception() for name in MODULES}
    assert result.pop("whole") is None and not set(MODULES) & set(sys.modules)
    assert all(type(error) is FailedImport for error in result.values())
    assert {name: str(error) for name, error in result.items()} == {
        "prints_and_fails": "`import prints_and_fails` fails: RuntimeError: operator x::nms does not exist",
        "lacks": "`import lacks` fails: ModuleNotFoundError: No module named 'not_there_at_all'",
        "exits": "`import exits` fails: SystemExit: 3",
        "crashes": "`import crashes` ends the process with status -6",
        "unicode": "`import unicode` fails: ValueError: é",
    }


@pytest.mark.slow
def test_what_doctor_looks_at_imports_here():
    checks = [check for checks in CHECKS.values() for check in checks]
    modules = [module for check in checks for module in check.imports if find_spec(module.partition(".")[0])]
    assert "torch" in modules
    with clean_imports(modules) as imports:
        assert {name: imports[name].exception() for name in modules} == dict.fromkeys(modules)


SCHEMA = "RuntimeError: operator torchvision::nms does not exist"
CPU, GPU = "https://download.pytorch.org/whl/cpu", "https://download.pytorch.org/whl/cu130"


@pytest.mark.parametrize(
    ("torch", "torchvision", "requirement", "command"),
    [
        ("2.13.0+cpu", "0.28.0", "torch (==2.13.0)", f"--no-deps torchvision==0.28.0 --index-url {CPU}"),
        ("2.13.0+cu130", "0.28.0+cpu", "torch==2.13.0", f"--no-deps torchvision==0.28.0 --index-url {GPU}"),
        ("2.13.0", "0.28.0", "torch==2.13.0", "--no-deps torchvision==0.28.0"),
        ("2.14.1", "0.28.0", "torch==2.13.0", "torchvision torch==2.14.1"),
        ("2.14.1+cpu", "0.28.0", "torch==2.13.0", f"torchvision torch==2.14.1 --index-url {CPU}"),
    ],
)
def test_torchvision_of_the_version_and_build_of_torch(torch, torchvision, requirement, command, monkeypatch):
    monkeypatch.setattr(doctor.metadata, "version", {"torch": torch, "torchvision": torchvision}.get)
    monkeypatch.setattr(doctor.metadata, "requires", {"torchvision": ["numpy", requirement]}.get)
    assert doctor.repair_command("torchvision", "ImportError: libx.so") == f"pip install --force-reinstall {command}"
    assert doctor.repair_command("transformers", SCHEMA) == f"pip install --force-reinstall {command}"


def test_another_package_is_installed_anew():
    assert doctor.repair_command("onnxruntime", "ImportError: libx.so") == "pip install --force-reinstall onnxruntime"
