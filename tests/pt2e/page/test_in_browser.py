"""Pages in headless Chromium: they sort, filter and open, by mouse and by keyboard, without an error or a request."""

import math
import struct
import time
from xml.etree import ElementTree

import pytest

from pt2mx.pt2e.report.report import QuantizationReport
from pt2mx.pt2e.report.results import RecipeComparison, RecipeRow, Sensitivity, SensitivityRow
from pt2mx.pt2e.report.rows import OperatorReport
from tests.browser import CHROMIUM, Browser, Page
from tests.reports import HOSTILE, full_report, operator, report_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

PLOTS = "[...document.querySelectorAll('main > section:not([hidden]) .plot:not([hidden])')]"
READY = (
    "document.readyState === 'complete' && document.documentElement.dataset.ready "
    f"&& {PLOTS}.every((plot) => plot.querySelector('svg'))"
)
ROWS = "[...document.querySelectorAll('.operators .row')]"
SHOWN = f"{ROWS}.filter((row) => !row.hidden)"
NAMES = f"{SHOWN}.map((row) => row.querySelector('.open').textContent)"


def column(number: int) -> str:
    """Return the numbers in a column."""
    return f"{SHOWN}.map((row) => parseFloat(row.cells[{number}].textContent))"


@pytest.fixture(scope="module")
def show(tmp_path_factory):
    """Open a page, and check at the end that it had no error, no other request and no overflow."""
    folder = tmp_path_factory.mktemp("pages")
    with Browser(folder / "profile") as browser:

        def shown(text: str, width: int = 1280) -> Page:
            file = folder / f"report{len(browser.pages)}.html"
            file.write_text(text)
            page = Page(browser, file, width)
            page.wait(READY)
            return page

        yield shown
        for page in browser.pages.values():
            assert page.problems == []
            assert len({url for url in page.requests if not url.startswith(("data:", "blob:"))}) == 1, "its own file"
            assert page.run("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture(scope="module", params=[1280, 980, 390])
def page(show, request):
    actual = full_report()
    return show(actual.report.to_html(**actual.more), request.param)


@pytest.fixture
def fresh(page):
    """A freshly loaded page."""
    page.run("delete document.documentElement.dataset.ready")
    page.send("Page.reload")
    page.wait(READY)
    return page


@pytest.mark.slow_except("390", "1280")
def test_the_answer_and_the_sections(fresh):
    answers = fresh.run("[...document.querySelectorAll('.answers .large')].map((one) => one.textContent)")
    assert answers[1:] == ["5.50", "0.9712", "8"]
    assert fresh.run("document.querySelectorAll('main > section:not([hidden])').length") == 5
    assert "description: " in fresh.run("document.querySelector('#recipe code').textContent")
    assert "layers.3" in fresh.run("document.querySelector('.outliers').textContent")
    assert fresh.run("document.querySelectorAll('#comparison circle.front').length") == 2, "float has no loss"


@pytest.mark.slow_except("390", "1280")
def test_the_speed_of_recipes(fresh):
    table = "[...document.querySelectorAll('#comparison > .scroll tbody tr')].map((row) => [...row.children]"
    assert fresh.run(f"{table}.map((cell) => cell.textContent))") == [
        ["bfloat16", "2.00", "2.00 to 2.00"],
        ["mxfp41.5x slower than bfloat16", "3.00", "3.00 to 3.00"],
        ["float32it does not compile", "\u2013", ""],
    ]
    last = fresh.run("document.querySelector('#comparison > .lead:last-child').textContent")
    assert "the median of 9 rounds in turns" in last and "a processor, 2 threads" in last


def test_it_sorts(fresh):
    order = fresh.run(NAMES)
    assert order == [*(f"layers.{i}" for i in range(8)), "head"]
    state = "document.querySelectorAll('.operators > thead th')[2].ariaSort"
    fresh.run("document.querySelectorAll('.operators > thead button')[2].focus()")
    for expected, reverse in (("ascending", False), ("descending", True)):
        fresh.press("Enter")
        assert fresh.run(state) == expected
        *numbers, last = fresh.run(column(2))
        assert numbers == sorted(numbers, reverse=reverse) and last is None, "the head has no ratio"
        assert fresh.run(NAMES)[0 if expected == "ascending" else -2] == "layers.3"
    fresh.press("Enter")
    assert (fresh.run(state), fresh.run(NAMES)) == ("none", order)


def test_it_filters(fresh):
    fresh.run("document.querySelector('#operators input').focus()")
    fresh.press(*"layers.5")
    assert fresh.run(NAMES) == ["layers.5"]
    assert fresh.run("document.querySelector('.count').textContent") == "1 of 9 operators"
    for kind, expected in (("left in high precision", ["head"]), ("quantized", [f"layers.{i}" for i in range(8)])):
        fresh.run("document.querySelector('#operators form').reset()")
        fresh.run(f"document.querySelector('#operators select').value = '{kind}'")
        fresh.run("document.querySelector('#operators form').dispatchEvent(new Event('input'))")
        assert fresh.run(NAMES) == expected


def test_a_row_opens_by_keyboard_and_by_mouse(fresh):
    shown = "[...document.querySelectorAll('.more')].filter((row) => !row.hidden).map((row) => row.textContent)"
    fresh.run("document.querySelector('.open').focus()")
    fresh.press("Enter")
    (text,) = fresh.run(shown)
    for part in ("saturated", "flushed", "candidates", "mxfp8_e4m3{32}", "sensitivity", "blocks by shared exponent"):
        assert part in text
    assert fresh.run("document.querySelectorAll('.more .histogram rect').length") > 0
    assert fresh.run("document.activeElement.ariaExpanded") == "true"
    fresh.run(f"{ROWS}[0].click()")
    assert fresh.run(shown) == [] and fresh.run("document.querySelector('.open').ariaExpanded") == "false"


def test_plots_by_keyboard(fresh):
    fresh.run("document.querySelector('#depth svg').focus()")
    fresh.press("Home", "ArrowRight")
    readout = fresh.run("document.querySelector('#depth .readout').textContent")
    assert readout.startswith("layers.0, weight in mxfp4_e2m1{32}: ")
    fresh.press("Enter")
    assert fresh.run("document.activeElement.textContent + document.activeElement.ariaExpanded") == "layers.0true"


def test_the_graph_around_an_operator(fresh):
    panels = (
        "[...document.querySelectorAll('.graph-panel')].map((one) => one.querySelector('.centre .what').textContent)"
    )
    fresh.run("document.querySelectorAll('.open')[2].click()")
    fresh.run("document.querySelector('.more .details > button').click()")
    assert fresh.run("document.querySelector('#graph select').selectedOptions[0].text") == "layers.2 (aten.linear)"
    assert fresh.run(panels) == ["aten.linear", "aten.linear"]
    nodes = "[...document.querySelectorAll('.graph-panel:last-child .node .what')].map((one) => one.textContent)"
    assert {"pt2mx.dequantize_mx", "pt2mx.quantize_mx"} <= set(fresh.run(nodes))
    fresh.run("document.querySelector('.graph-panel:last-child .node:not(.centre)').focus()")
    name = fresh.run("document.activeElement.ariaLabel")
    fresh.press("Enter")
    assert fresh.run("document.querySelector('.graph-panel:last-child .centre').ariaLabel") == name
    assert fresh.run("document.activeElement.ariaLabel") == name, "the focus stays on it"


def test_the_text_for_assistive_technology(fresh):
    nodes = fresh.send("Accessibility.getFullAXTree")["nodes"]
    heard = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    roles = {role for role, _ in heard}
    assert {"main", "banner", "navigation", "table", "columnheader", "row", "rowheader", "cell", "search"} <= roles
    assert sum(role == "columnheader" for role, _ in heard) == 8 + 4
    assert all(name for role, name in heard if role in ("button", "link", "combobox", "searchbox", "heading"))
    assert ("heading", "Operators") in heard


def test_hostile_names(show):
    report = report_of(*(operator(name, 20.0, reason=name) for name in HOSTILE))
    actual = Sensitivity("kl", (SensitivityRow(HOSTILE[0], "mxfp4", "both", alone=math.inf),), {})
    page = show(report.to_html(model=HOSTILE[1], sensitivity=actual), 390)
    assert page.run(NAMES) == list(HOSTILE)
    page.run(f"{ROWS}.forEach((row) => row.querySelector('.open').click())")
    assert page.run("document.querySelectorAll('img, main script').length") == 0
    assert page.run("document.title") == HOSTILE[1]


@pytest.mark.parametrize("ratios", [(), (math.nan,), (math.inf, -math.inf, math.nan, 10.0)])
def test_no_rows_and_ratios_that_are_not_finite(show, ratios):
    page = show(report_of(*(operator(f"m{i}", sqnr) for i, sqnr in enumerate(ratios))).to_html())
    words = {math.nan: "\u2013", math.inf: "∞", -math.inf: "\u2212∞", 10.0: "10.0"}
    assert page.run(f"{ROWS}.map((row) => row.cells[2].textContent)") == [words[ratio] for ratio in ratios]
    page.run("document.querySelectorAll('.operators > thead button')[2].click()")
    assert page.run(NAMES) == (["m1", "m3", "m0", "m2"] if len(ratios) > 1 else [f"m{i}" for i in range(len(ratios))])
    page.run(f"{ROWS}.forEach((row) => row.click())")


@pytest.mark.parametrize(("count", "places"), [(1, "1"), (2, "12"), (3, "123"), (8, "12345678")])
def test_operators_have_whole_numbers(show, count, places):
    page = show(report_of(*(operator(name, 10.0) for name in "abcdefgh"[:count])).to_html())
    texts = page.run("[...document.querySelectorAll('#depth .grid text')].map((one) => one.textContent)")
    assert texts[-count:] == list(places) and all(text.isdigit() for text in texts)


def test_a_comparison_of_a_model_without_parameters(show):
    table = RecipeComparison.of("cosine", True, [RecipeRow("float", 0, 0.0, 1.0), RecipeRow("mxfp8", 0, 0.0, 0.999)])
    page = show(report_of(operator("m", 10.0)).to_html(recipe="mxfp8", comparison=table))
    assert page.run("document.querySelector('#comparison .plot').offsetHeight") == 0
    assert page.run("[...document.querySelectorAll('#comparison tbody th')].map((one) => one.textContent)") == [
        "floatfront", "mxfp8",
    ]  # fmt: skip


def crowded(metric="cosine", larger_is_better=True):
    """Return a comparison of recipes that lie close together, with their errors."""
    losses = {
        "mxfp8": 3.06e-5,
        "mxfp8_e5m2": 9e-5,
        "mxfp6": 8.1e-5,
        "mxfp6_e3m2": 8e-5,
        "mxint8": 3.16e-5,
        "mxfp4": 4e-3,
    }
    rows = [RecipeRow("float", 100_000, 32.0, 1.0 if larger_is_better else 0.0)]
    for i, (name, loss) in enumerate(losses.items()):
        quality = 1 - loss if larger_is_better else loss
        samples = (loss,) * 4
        rows.append(RecipeRow(name, 26_000 + 10 * i, 8.25, quality, error=0.2 * loss, samples=samples))
    return RecipeComparison.of(metric, larger_is_better, rows)


BOXES = (
    "[...document.querySelectorAll('#comparison .label')].map((one) => one.getBoundingClientRect())"
    ".map((box) => [box.left, box.top, box.right, box.bottom])"
)


@pytest.mark.parametrize("width", [980, 390])
@pytest.mark.parametrize(("metric", "up"), [("cosine", True), ("divergence, nats", False)])
def test_labels_of_close_recipes_do_not_collide(show, metric, up, width):
    page = show(report_of(operator("m", 10.0)).to_html(comparison=crowded(metric, up)), width)
    boxes = page.run(BOXES)
    assert len(boxes) == 6, "each recipe but float, which has no loss"
    for i, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[:i]:
            assert left >= other[2] or right <= other[0] or top >= other[3] - 3 or bottom <= other[1] + 3
        assert left >= 0 and right <= width


def test_the_axis_of_qualities_is_logarithmic(show):
    page = show(report_of(operator("m", 10.0)).to_html(comparison=crowded()))
    heights = page.run(
        "Object.fromEntries([...document.querySelectorAll('#comparison circle:not(.cursor)')]"
        ".map((one, i) => [JSON.parse(data.textContent).comparison.rows.filter((row) => row.y > 0)[i].name, "
        "Number(one.getAttribute('cy'))]))"
    )
    losses = {row.name: 1 - row.quality for row in crowded().rows if row.quality < 1}
    pixels = (heights["mxfp4"] - heights["mxfp8"]) / math.log(losses["mxfp4"] / losses["mxfp8"])
    for name, loss in losses.items():
        assert heights[name] == pytest.approx(heights["mxfp8"] + pixels * math.log(loss / losses["mxfp8"]), abs=0.1)
    assert pixels > 0, "better is higher"
    axis = page.run("[...document.querySelectorAll('#comparison .grid text')].map((one) => one.textContent)")
    assert {"0.999", "0.9999"} <= set(axis)
    assert page.run("document.querySelectorAll('#comparison .bar').length") == 6
    lead = page.run("document.querySelector('#comparison .lead').textContent")
    assert "95 % intervals" in lead and "not in the plot: float" in lead
    assert page.run("document.querySelector('#comparison .advice').textContent") == crowded().advice()
    notes = page.run("[...document.querySelectorAll('#comparison .note')].map((one) => one.textContent)")
    assert "too few samples to rank it against mxfp8" in notes


def test_drawings_are_saved(show, tmp_path):
    actual = full_report()
    page = show(actual.report.to_html(**actual.more))
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.run("document.querySelectorAll('.open')[2].click()")
    count = page.run("document.querySelectorAll('svg[role=group], .histogram svg').length")
    assert page.run("document.querySelectorAll('.downloads').length") == count >= 6
    for kind in ("SVG", "PNG"):
        page.run(f"document.querySelector('#comparison [aria-label$={kind}]').click()")
    drawing, picture = (tmp_path / f"a-stack-of-layers-cosine-against-bytes.{kind}" for kind in ("svg", "png"))
    end = time.monotonic() + 20
    while not (drawing.exists() and picture.exists()):
        assert time.monotonic() < end, list(tmp_path.iterdir())
        time.sleep(0.05)
    root = ElementTree.fromstring(drawing.read_text())
    shown = page.run(
        "(({ width, height }) => [width, height])(document.querySelector('#comparison svg').viewBox.baseVal)"
    )
    assert [float(root.get(side)) for side in ("width", "height")] == shown
    names = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"mxfp4", "mxfp8", "worse"} <= names
    points = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(points) == 3 and all(point.get("fill").startswith("rgb") for point in points), "without a style sheet"
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert list(struct.unpack(">II", data[16:24])) == [round(side * 300 / 96) for side in shown]


def test_an_operator_outside_of_modules(show):
    row = OperatorReport("matmul_1", "", "aten.matmul", operator("", 10.0).operands, None, source="model.py:12")
    page = show(report_of(row).to_html(), 390)
    assert page.run(NAMES) == ["matmul_1"]
    assert page.run(f"{ROWS}[0].querySelector('.kind').textContent") == "aten.matmul at model.py:12"


@pytest.mark.parametrize(("before", "text"), [(300, "3.0\u00d7 less than 300 B"), (104, "of 104 B")])
def test_the_size_in_words(show, before, text):
    report = QuantizationReport((operator("m", 10.0),), values=64, bytes_before=before, bytes_after=100)
    page = show(report.to_html())
    assert page.run("document.querySelector('#answers .note').textContent") == text


@pytest.mark.parametrize(("metric", "note"), [("cosine", "against the float model"), ("accuracy", None)])
def test_only_a_comparison_is_with_the_float_model(show, metric, note):
    table = RecipeComparison.of("cosine", True, [RecipeRow("float", 256, 32.0, 1.0), RecipeRow("mxfp8", 66, 8.2, 0.99)])
    page = show(report_of(operator("m", 10.0)).to_html(quality={metric: 0.9}, comparison=table))
    assert page.run("document.querySelectorAll('#answers > div')[2].querySelector('.note')?.textContent") == note
