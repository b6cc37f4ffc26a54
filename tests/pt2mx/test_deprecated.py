import importlib
import importlib.util
import pickle
import sys

import pytest

import pt2mx
from pt2mx import deprecated


@pytest.fixture
def renamed(tmp_path, monkeypatch):
    """A package `house` on the path. Its module `room` was `old_room`; `NEW` was `OLD`, there and in `house`."""
    room = tmp_path / "house" / "room"
    room.mkdir(parents=True)
    (room.parent / "__init__.py").write_text("")
    (room / "__init__.py").write_text("")
    (room / "shelf.py").write_text("NEW = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(deprecated.MODULES, "house.old_room", "house.room")
    monkeypatch.setitem(deprecated.NAMES, "house.old_room.shelf:OLD", "house.room.shelf:NEW")
    monkeypatch.setitem(deprecated.NAMES, "house:OLD", "house.room.shelf:NEW")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    deprecated.install()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "house"]:
        del sys.modules[name]


def test_module_and_submodule(renamed):
    with pytest.warns(FutureWarning, match=r"^house.old_room is deprecated: use house.room$"):
        old = importlib.import_module("house.old_room")
    with pytest.warns(FutureWarning, match=r"^house.old_room.shelf is deprecated: use house.room.shelf$") as warned:
        shelf = importlib.import_module("house.old_room.shelf")
    assert warned[0].filename == importlib.__file__  # of the importer, not of the table
    assert old is importlib.import_module("house.room") and old.__name__ == "house.room"
    assert shelf is importlib.import_module("house.room.shelf") and shelf.NEW == 3


def test_name_in_a_module(renamed):
    shelf = importlib.import_module("house.room.shelf")
    with pytest.warns(FutureWarning, match=r"^house.room.shelf.OLD is deprecated: use house.room.shelf.NEW$") as warned:
        assert shelf.OLD == 3
    assert warned[0].filename == __file__
    with pytest.raises(AttributeError, match=r"^module 'house.room.shelf' has no attribute 'OLDER'$"):
        _ = shelf.OLDER


def test_import_of_a_name_warns_once(renamed):
    for _ in range(2):  # and each time: another file may use the old name too
        with pytest.warns(FutureWarning) as warned:
            exec("from house import OLD\nassert OLD == 3")
        assert [str(each.message) for each in warned] == ["house.OLD is deprecated: use house.room.shelf.NEW"]
        assert warned[0].filename == "<string>"


def test_looking_is_not_importing(renamed):
    assert importlib.util.find_spec("house.old_room")
    assert "house.room" not in sys.modules


def test_old_argument(monkeypatch):
    monkeypatch.setitem(deprecated.ARGUMENTS, "test_old_argument.<locals>.half", {"number": "x"})

    @deprecated.renamed_arguments
    def half(x, digits=1):
        return round(x / 2, digits)

    with pytest.warns(FutureWarning, match="^argument 'number' of half is deprecated: use 'x'$"):
        assert half(number=3, digits=0) == 2
    assert half(3) == 1.5
    with pytest.raises(TypeError, match=r"half\(\) got 'x' and 'number', its old name"):
        half(x=3, number=3)


def resolve(name):
    """Import a module, or `module:name`."""
    module, _, attribute = name.partition(":")
    value = importlib.import_module(module)
    return getattr(value, attribute) if attribute else value


def test_rows():
    """Each old name is what the new name is, and no old name is a public name of today."""
    for old, new in {**deprecated.MODULES, **deprecated.NAMES}.items():
        with pytest.warns(FutureWarning):
            value = resolve(old)
        assert value is resolve(new), old
        assert old.removeprefix("pt2mx:") not in pt2mx.__all__


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "old",
    [
        "pt2mx.pt2e.collector:StatisticsCollector",
        "pt2mx.pt2e.debug.bisect:Piece",
        "pt2mx.pt2e.debug.comparison:Compared",
        "pt2mx.pt2e.debug.comparison:StageComparison",
        "pt2mx.pt2e.debug.differences:Difference",
        "pt2mx.pt2e.language.perplexity:Perplexity",
        "pt2mx.pt2e.onnx.float_report:OnnxReport",
        "pt2mx.pt2e.report.fidelity:Fidelity",
        "pt2mx.pt2e.sensitivity.recipe_comparison:RecipeComparison",
        "pt2mx.pt2e.sensitivity.result:Sensitivity",
        "pt2mx.quark.enums:VitisQuantFormat",
    ],
)
def test_pickles_of_older_versions(old):
    """A pickle names the module and the class of an object as they were."""
    module, _, name = old.partition(":")
    loaded = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert loaded is resolve(deprecated.NAMES.get(old, f"{deprecated.MODULES.get(module, module)}:{name}"))
