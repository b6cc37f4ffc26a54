"""The documentation site has every document and every public name, and builds without a warning."""

import importlib.util
import re
import subprocess
import sys
import types
from collections import Counter

import pytest

import pt2mx
from tests.documents import DOCUMENTS, NOTEBOOKS, ROOT, name_of

SITE = ROOT / "notebooks" / "site"


@pytest.fixture
def names():
    spec = importlib.util.spec_from_file_location("names", SITE / "names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def groups():
    return re.findall(r"^```\{names\} (.*)$", (SITE / "api.md").read_text(), re.MULTILINE)


def test_each_public_name_is_documented_once(names):
    documented = Counter(name for group in groups() for name in names.defined_in(group.split()))
    public = set(names.public_names()) - {"__version__"}
    assert documented == Counter(public) and public >= {"MXQuantizer", "convert_pt2e", "cpp", "FORMATS"}
    kinds = {type(getattr(pt2mx, name)) for name in public}
    assert {type, types.FunctionType, types.ModuleType, dict} <= kinds


def test_a_name_is_documented_by_its_kind(names):
    assert names.directive("convert_pt2e") == ".. autofunction:: pt2mx.convert_pt2e\n"
    members = names.directive("MXQuantizer").removeprefix(".. autoclass:: pt2mx.MXQuantizer\n   :members: ")
    assert {"set_global", "set_module_name", "from_recipe"} <= set(members.strip().split(", "))
    assert names.directive("FORMATS") == ".. autodata:: pt2mx.formats.FORMATS\n   :no-value:\n"


def test_the_index_lists_each_document():
    listed = set(re.findall(r"<(/.*)>$|^(api)$", (SITE / "index.md").read_text(), re.MULTILINE))
    pages = {page or other for page, other in listed}
    links = ("pt2mx/fx", "pt2mx/pt2e", "pt2mx/configs")
    documents = [name_of(path) for path in [*DOCUMENTS, *ROOT.glob("*.md")]]
    assert {f"/{name.removesuffix('.md')}" for name in documents if not name.startswith(links)} <= pages
    assert all(path.name.startswith(tuple("0123456789")) for path in NOTEBOOKS)  # as the index's pattern


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path):
    pytest.importorskip("myst_nb", reason="pip install -c constraints.txt -e '.[docs]'")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-c",
        str(SITE),
        "-d",
        str(tmp_path / "trees"),
    ]
    done = subprocess.run([*command, str(ROOT), str(tmp_path / "site")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "site" / "index.html").read_text()  # leads to the start page
    assert set(re.findall(r'(?:url=|href=")([^">]+)"', start)) == {"notebooks/site/index.html"}
    page = (tmp_path / "site" / "notebooks" / "site" / "api.html").read_text()
    assert "pt2mx.convert_pt2e" in page and 'id="pt2mx.MXQuantizer.set_global"' in page
