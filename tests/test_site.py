"""The documentation site has every document and public name, builds without a warning, and fits its windows."""

import importlib.util
import re
import subprocess
import sys
import types
from collections import Counter
from fnmatch import fnmatch

import pytest

import pt2mx
from tests.browser import CHROMIUM, Browser, Page
from tests.documents import DOCUMENTS, NOTEBOOKS, ROOT, name_of

SITE = ROOT / "notebooks" / "site"


@pytest.fixture
def names():
    spec = importlib.util.spec_from_file_location("names", SITE / "names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_public_name_is_on_the_page_of_one_module(names):
    modules = names.modules((SITE / "api.md").read_text())
    documented = Counter(name for module in modules for name in names.defined_in(module))
    public = set(names.public_names()) - {"__version__"}
    assert documented == Counter(public) and public >= {"MXQuantizer", "convert_pt2e", "cpp", "FORMATS"}
    kinds = {type(getattr(pt2mx, name)) for name in public}
    assert {type, types.FunctionType, types.ModuleType, dict} <= kinds


def test_a_name_is_documented_by_its_kind(names):
    assert names.directive("convert_pt2e") == ".. autofunction:: pt2mx.convert_pt2e\n"
    members = names.directive("MXQuantizer").removeprefix(".. autoclass:: pt2mx.MXQuantizer\n   :members: ")
    assert {"set_global", "set_module_name", "from_recipe"} <= set(members.strip().split(", "))
    assert names.directive("FORMATS") == ".. autodata:: pt2mx.formats.FORMATS\n   :no-value:\n"


def test_the_contents_link_to_names(names):
    text = names.contents(["pt2mx.pt2e.flow.convert", "pt2mx.errors"])
    assert "| {py:obj}`convert_pt2e <pt2mx.convert_pt2e>` | Replace the observers" in text
    assert text.endswith("api/pt2mx.pt2e.flow.convert\napi/pt2mx.errors\n```")
    assert names.page("pt2mx.pt2e.flow.convert").splitlines()[0] == "# pt2mx.pt2e.flow.convert"


def test_the_navigation_lists_each_document():
    pages = re.findall(r"(/[^<>\s]+)>?$", (SITE / "navigation.md").read_text(), re.MULTILINE)
    links = ("pt2mx/fx", "pt2mx/pt2e", "pt2mx/configs")
    documents = [name_of(path) for path in [*DOCUMENTS, *NOTEBOOKS, *ROOT.glob("*.md")] if path != ROOT / "README.md"]
    listed = [f"/{name.removesuffix('.md').removesuffix('.ipynb')}" for name in documents if not name.startswith(links)]
    assert [name for name in listed if not any(fnmatch(name, page) for page in pages)] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site, where a warning is an error."""
    pytest.importorskip("myst_nb", reason="pip install -c constraints.txt -e '.[docs]'")
    folder = tmp_path_factory.mktemp("built")
    options = ["-q", "-W", "--keep-going", "-c", str(SITE), "-d", str(folder / "trees")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT), str(folder / "site")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.mark.slow
def test_the_pages(site):
    start = (site / "index.html").read_text()
    assert set(re.findall(r'(?:url=|href=")([^">]+)"', start)) == {"README.html"}
    first = (site / "README.html").read_text()
    assert all(part in first for part in ("measured.svg", "constraints", "copybutton.js"))
    convert = (site / "notebooks/site/api/pt2mx.pt2e.flow.convert.html").read_text()
    signature = convert[convert.index('id="pt2mx.convert_pt2e"') :].partition("</dt>")[0]
    assert "fold_quantize: bool = True" in " ".join(re.sub("<[^>]*>", "", signature).split())
    quantizer = (site / "notebooks/site/api/pt2mx.pt2e.quantizer.html").read_text()
    assert 'id="pt2mx.MXQuantizer.set_global"' in quantizer
    guide = (site / "pt2e/language/README.html").read_text()
    assert "<h1>Language models<" in guide and "signature.py" in guide.partition("<summary>Source files</summary>")[2]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.send("Browser.getVersion")  # it has started, and made its temporary files
        yield browser


@pytest.mark.slow
def test_no_page_is_cut(site, browser):
    """At 1280 pixels no table is wider than its page, at 390 no page is wider than the window."""
    cut = "[...document.querySelectorAll('.table-wrapper')].some(table => table.scrollWidth > table.clientWidth)"
    wide = "document.documentElement.scrollWidth > innerWidth"
    pages = [path for path in site.rglob("*.html") if not path.is_relative_to(site / "_modules")]
    pages.remove(site / "index.html")  # which leads to another
    found = []
    for width, condition in ((1280, cut), (390, wide)):
        for path in pages:
            page = Page(browser, path, width)
            page.wait("document.readyState === 'complete' && location.protocol === 'file:'")
            if page.run(condition):
                found.append((width, path.name))
            page.close()
    assert len(pages) > 60 and not found
