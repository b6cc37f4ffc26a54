import re

from pt2mx.pt2e.report.page.page import asset
from pt2mx.pt2e.report.page.table_page import table_page
from tests.pt2e.report.page.test_page import Elements
from tests.reports import HOSTILE


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
