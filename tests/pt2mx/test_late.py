import importlib
import importlib.util
import inspect
import sys
from types import ModuleType

import pytest

import pt2mx
from pt2mx.late import reach, when_imported


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder of modules on the path: `late_package`, with `inner.leaf`, `broken` and `plain`."""
    inner = tmp_path / "late_package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").write_text("")
    (inner / "leaf.py").write_text("VALUE = 3\n")
    (inner.parent / "plain.py").write_text("VALUE = 1\n")
    (inner.parent / "broken.py").write_text("import os\nif 'STILL_BROKEN' in os.environ: raise ValueError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("late_package")
    for name in [name for name in sys.modules if name.partition(".")[0] == "late_package"]:
        del sys.modules[name]


def test_modules_are_imported_when_they_are_reached(package):
    reach(package, {"VALUE": "late_package.plain"})
    assert "late_package.inner" not in sys.modules
    assert package.inner.leaf.VALUE == 3 and package.VALUE == 1
    assert vars(package)["VALUE"] == 1  # found at once from now on


@pytest.mark.parametrize("name", ["nothing", "__wrapped__", "_private"])
def test_what_is_no_module_is_no_attribute(name):
    with pytest.raises(AttributeError, match=f"module 'pt2mx' has no attribute '{name}'"):
        getattr(pt2mx, name)


def test_the_call_comes_once_the_module_is_complete(package):
    seen = []
    when_imported("late_package.plain", lambda: seen.append(sys.modules["late_package.plain"].VALUE))
    assert importlib.util.find_spec("late_package.plain") and seen == []  # looking is not importing
    module = importlib.import_module("late_package.plain")
    assert seen == [1]
    importlib.reload(module)
    assert seen == [1] and inspect.getsource(module) == "VALUE = 1\n"
    when_imported("late_package.plain", lambda: seen.append(2))
    assert seen == [1, 2]


def test_calls_wait_for_an_import_that_succeeds(package, monkeypatch):
    seen = []
    for number in (1, 2):
        when_imported("late_package.broken", lambda number=number: seen.append(number))
    monkeypatch.setenv("STILL_BROKEN", "1")
    with pytest.raises(ValueError):
        importlib.import_module("late_package.broken")
    monkeypatch.delenv("STILL_BROKEN")
    assert seen == [] and isinstance(importlib.import_module("late_package.broken"), ModuleType)
    assert seen == [1, 2]


def test_a_module_that_does_not_exist_is_still_not_found():
    when_imported("late_package_that_is_none", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("late_package_that_is_none")
