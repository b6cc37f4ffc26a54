import importlib.util

import pytest

from pt2mx import FORMATS, MXError
from pt2mx.conformance.adapters import table
from pt2mx.conformance.adapters.case import Case
from pt2mx.conformance.adapters.table import ADAPTERS, Adapter, missing, score


@pytest.mark.parametrize("name", ["pt2mx-torch", "pt2mx-c++"])
def test_pt2mx_has_no_deviation(name):
    results = list(score(name, ["mxfp4"]))
    assert [result.scale_mode for result in results] == ["floor", "ceil", "rceil", "rceil_v2", "even", "mse"]
    assert all(result.conforms and result.rounding == "even" for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["pt2mx-torch", "pt2mx-c++"])
def test_pt2mx_has_no_deviation_in_any_format(name, format):
    assert all(result.conforms for result in score(name, [format]))


def test_every_adapter_has_a_module():
    for name, adapter in ADAPTERS.items():
        module, _, function = adapter.function.partition(":")
        assert importlib.util.find_spec(f"pt2mx.conformance.adapters.{module}") and function, name
        assert adapter.install or adapter.package == "pt2mx", name


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "other", Adapter("own:torch_cases", "other", "no_such_module", "pip install other"))
    assert missing(["pt2mx-torch", "other"]) == {"other": "pip install other"}
    with pytest.raises(MXError, match="other is not installed: pip install other"):
        list(score("other"))
    with pytest.raises(MXError, match="unknown implementation 'pt2mx-trch': did you mean 'pt2mx-torch'"):
        list(score("pt2mx-trch"))


def test_what_an_adapter_raises_is_a_row(monkeypatch):
    def fails():
        yield Case("fp4_e2m1", lambda x: x[:1], scale_mode="floor", variant="short")
        raise ImportError("a library of another version")

    monkeypatch.setattr(table.importlib, "import_module", lambda name: type("module", (), {"torch_cases": fails}))
    first, second = score("pt2mx-torch")
    assert first.name.endswith("(short)") and not first.conforms
    assert first.rows[0].example.startswith("raised MXError: quantize must return")
    assert second.rows[0].example == "raised ImportError: a library of another version"
