import json
import math
import re
from html.parser import HTMLParser

import pytest

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.page.page import asset, table_page
from tests.reports import HOSTILE, full_report, operator, report_of


class Elements(HTMLParser):
    """Collects the text of a page's elements, and checks that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


def data_of(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


@pytest.fixture(scope="module")
def full():
    actual = full_report()
    actual.text = actual.report.to_html(**actual.more)
    return actual


def test_the_page_of_a_report_is_written_whole(full, tmp_path):
    text = full.report.to_html(tmp_path / "report.html", **full.more)
    assert text == full.text == (tmp_path / "report.html").read_text()
    elements = Elements(text)
    assert elements.texts["title"] == elements.texts["h1"] == "a stack of layers"
    assert elements.texts["pre"].strip() == full.report.to_table().strip()
    assert full.report.summary in elements.texts["p"]
    assert data_of(text)["recipe"]["name"] == "mxfp4"


def test_it_needs_nothing_else(full):
    actual = re.findall(r"(?:src|href)=\S+|url\(|@import|https?://\S+", full.text)
    assert set(actual) == {'href="#operators">Skip', 'http://www.w3.org/2000/svg",'}
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', full.text)[1]
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-\S+'; script-src 'sha256-\S+'; img-src data:", policy)
    assert not re.search(r"\sstyle=", full.text), "the policy would not apply it"
    assert "{{" not in full.text.replace("{{data}}", "")


def test_names_are_text():
    report = report_of(*(operator(name, 20.0, reason=name) for name in HOSTILE))
    text = report.to_html(model=HOSTILE[0], quality=dict.fromkeys(HOSTILE, 1.0))
    text.encode()
    assert Elements(text).names == Elements(report_of(operator("m", 20.0)).to_html()).names
    assert [actual["module"] for actual in data_of(text)["operators"]] == list(HOSTILE)
    assert "<img" not in text and "<!--" not in text
    assert Elements(text).texts["title"] == HOSTILE[0]


def test_numbers_that_are_not_finite_and_no_rows():
    odd = report_of(*(operator("m", sqnr) for sqnr in (math.nan, math.inf, -math.inf)))
    assert [o["operands"][0]["seen"]["noise"][0] for o in data_of(odd.to_html())["operators"]] == [
        "NaN", "Infinity", "-Infinity",
    ]  # fmt: skip
    empty = report_of().to_html()
    assert data_of(empty)["operators"] == [] and "0 of 0 operators quantized" in empty
    assert Elements(empty).texts["h1"] == "Quantization report"


def test_of_a_report_that_was_stored(full, tmp_path):
    full.report.to_json(tmp_path / "report.json")
    stored = pt2mx.pt2e.report.report.QuantizationReport.from_json(tmp_path / "report.json")
    assert stored.to_html(**full.more) == full.text


def test_errors_write_no_file(full, tmp_path):
    for more, message in (
        ({"recipe": "mxfp44"}, "no recipe"),
        ({"before": 5}, "before must be a GraphModule, and is of type int"),
        ({"quality": 0.9}, "quality must be Mapping"),
    ):
        with pytest.raises(MXError, match=message):
            full.report.to_html(tmp_path / "report.html", **more)
    assert not list(tmp_path.iterdir())


def test_a_page_of_a_table():
    text = table_page("Bytes", "By name.", ["name", "bytes"], [("a", "1"), ("b", "2")], 1, ["That is all."])
    elements = Elements(text)
    assert elements.texts["title"] == elements.texts["h1"] == "Bytes"
    assert elements.texts["p"] == "By name.That is all."
    assert (elements.texts["th"], elements.texts["td"]) == ("namebytes", "a1b2")
    assert re.findall(r'<t([hd]) class="words">(\w+)</t', text) == [("h", "name"), ("d", "a"), ("d", "b")]
    assert elements.names.count("tr") == 3 and asset("page.css") in text


def test_it_needs_nothing_else_and_names_are_text():
    text = table_page(HOSTILE[0], HOSTILE[0], HOSTILE, [HOSTILE, HOSTILE], 1, HOSTILE)
    text.encode()
    assert Elements(text).texts["td"] == "".join(HOSTILE).replace("\ud800", "\ufffd") * 2
    assert "<img" not in text and "<!--" not in text and "<script" not in text
    assert re.search(r"content=\"default-src 'none'; style-src 'sha256-\S+'\"", text)
    assert set(Elements(text).names) == set(Elements(table_page("a", "b", ["c"], [("d",)], 1, ["e"])).names)
    assert not re.findall(r"url\(|@import|https?://\S+|\sstyle=", text)
    assert "<footer>" not in table_page("a", "b", ["c"], [], 1)
