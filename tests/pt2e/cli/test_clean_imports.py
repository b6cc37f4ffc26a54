import sys

import pytest

from pt2mx.pt2e.cli.clean_imports import FailedImport, clean_imports
from pt2mx.pt2e.cli.doctor_checks import CHECKS

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
        found = {name: imports[name].exception() for name in MODULES}
    assert found.pop("whole") is None and not set(MODULES) & set(sys.modules)
    assert all(type(error) is FailedImport for error in found.values())
    assert {name: str(error) for name, error in found.items()} == {
        "prints_and_fails": "`import prints_and_fails` fails: RuntimeError: operator x::nms does not exist",
        "lacks": "`import lacks` fails: ModuleNotFoundError: No module named 'not_there_at_all'",
        "exits": "`import exits` fails: SystemExit: 3",
        "crashes": "`import crashes` ends the process with status -6",
        "unicode": "`import unicode` fails: ValueError: é",
    }


@pytest.mark.slow
def test_what_doctor_looks_at_imports_here():
    modules = [module for checks in CHECKS.values() for check in checks for module in check.imports]
    with clean_imports(modules) as imports:
        assert {name: imports[name].exception() for name in modules} == dict.fromkeys(modules)
