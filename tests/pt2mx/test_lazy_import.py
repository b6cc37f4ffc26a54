import importlib
import importlib.util
import inspect
import sys
from types import ModuleType

import pytest

import pt2mx
from pt2mx.lazy_import import attach_lazy, on_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder of modules on the path: `lazy_package`, with `inner.leaf`, `broken` and `plain`."""
    inner = tmp_path / "lazy_package" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").write_text("")
    (inner / "leaf.py").write_text("VALUE = 3\n")
    (inner.parent / "plain.py").write_text("VALUE = 1\n")
    (inner.parent / "broken.py").write_text("import os\nif 'STILL_BROKEN' in os.environ: raise ValueError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("lazy_package")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lazy_package"]:
        del sys.modules[name]


def test_modules_are_imported_on_first_use(package):
    attach_lazy(package, {"VALUE": "lazy_package.plain"})
    assert "lazy_package.inner" not in sys.modules
    assert package.inner.leaf.VALUE == 3 and package.VALUE == 1
    assert vars(package)["VALUE"] == 1  # no `__getattr__` from now on


@pytest.mark.parametrize("name", ["nothing", "__wrapped__", "_private"])
def test_unknown_attribute(name):
    with pytest.raises(AttributeError, match=f"module 'pt2mx' has no attribute '{name}'"):
        getattr(pt2mx, name)


def test_the_call_comes_once_the_module_is_complete(package):
    seen = []
    on_import("lazy_package.plain", lambda: seen.append(sys.modules["lazy_package.plain"].VALUE))
    assert importlib.util.find_spec("lazy_package.plain") and seen == []  # looking is not importing
    module = importlib.import_module("lazy_package.plain")
    assert seen == [1]
    importlib.reload(module)
    assert seen == [1] and inspect.getsource(module) == "VALUE = 1\n"
    on_import("lazy_package.plain", lambda: seen.append(2))
    assert seen == [1, 2]


def test_calls_wait_for_an_import_that_succeeds(package, monkeypatch):
    seen = []
    for number in (1, 2):
        on_import("lazy_package.broken", lambda number=number: seen.append(number))
    monkeypatch.setenv("STILL_BROKEN", "1")
    with pytest.raises(ValueError):
        importlib.import_module("lazy_package.broken")
    monkeypatch.delenv("STILL_BROKEN")
    assert seen == [] and isinstance(importlib.import_module("lazy_package.broken"), ModuleType)
    assert seen == [1, 2]


def test_a_module_that_does_not_exist_is_still_not_found():
    on_import("lazy_package_that_is_none", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lazy_package_that_is_none")
