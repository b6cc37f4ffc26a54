"""Each measured figure has one source: a page that quotes one links to the section of the benchmarks that states it."""

import re
from pathlib import Path

import pytest

from tests.benchmarks.recipes import tables
from tests.documents import DOCUMENTS, ROOT, name_of

BENCHMARKS, CONFIGS = ROOT / "tests/benchmarks/README.md", ROOT / "configs/README.md"
PEERS = ROOT / "tests/benchmarks/peers/results.md"
_CONFORMANCE = ROOT / "tests/conformance/README.md"  # its numbers are values of tensors
PAGES = [
    path
    for path in (*DOCUMENTS, *sorted((ROOT / "notebooks/site").glob("*.md")))
    if path not in (BENCHMARKS, PEERS, _CONFORMANCE)
]

_N = r"(?:\d+\.?\d*|\.\d+)"
_SPEED = rf"{_N}x(?: to {_N}x)? (?:as )?(?:faster|slower|fast)\b"
_UNITS = "microseconds|milliseconds|ms|(?:processor )?seconds|s|kB|MB|GB|GB/s|dB|nats|times as long|tokens a second"
_BOUNDS = "".join(f"(?<!{words} )" for words in ("at least", "at most", "more than", "below", "some"))
#: what a measured figure looks like; after the words of a bound a number is a limit or a goal
_FIGURE = re.compile(
    rf"(?<![\w.*/-])(?:{_SPEED}"  # 1.8x to 2.6x faster
    rf"|{_BOUNDS}(?:{_N} to )?{_N} (?:{_UNITS})\b"  # 24 s, 0.8 to 1.2 times as long
    rf"|{_BOUNDS}{_N}[x%](?!\w)"
    rf"|{_BOUNDS}(?:\.\d{{2,4}}|0\.\d{{3,4}}|\d\.\d{{4}}|\d{{2,}}\.\d\d|{_N}e-\d+)(?![\w.]))"  # a cosine, a loss
)
_HEADING, _CODE = (
    re.compile(r"^#+ (.*)$", re.MULTILINE),
    re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL),
)


def sections(text: str) -> list[tuple[str, str]]:
    """Return (anchor, text to the next heading) of each heading, without code, bold type and commas in numbers."""
    _, *parts = _HEADING.split(re.sub(r"(?<=\d),(?=\d{3})|\*\*", "", _CODE.sub("", text)))
    anchors = (re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in parts[::2])
    return list(zip(anchors, parts[1::2], strict=True))


#: (page, anchor) -> the text of a section that may be quoted; tables of configs/ and peers/ equal their `measured.json`
SOURCES = {
    (path, anchor): text
    for path, page in ((BENCHMARKS, BENCHMARKS.read_text()), (PEERS, PEERS.read_text()), (CONFIGS, tables()))
    for anchor, text in sections(page)
}


def quoted(text: str) -> list[str]:
    """Return the measured figures in a text."""
    return _FIGURE.findall(" ".join(text.split()))


def states(source: str, figure: str) -> bool:
    """Return whether a section has a figure in the same words, or all of its numbers in cells of tables."""
    source, figure = (re.sub(r"(?<![\d.])0(?=\.\d)", "", text) for text in (source, figure))
    if re.search(rf"(?<![\w.])(?<!\dx to ){re.escape(figure)}(?!\w|\.\d)", " ".join(source.split())):
        return True
    cells = " ".join(line for line in source.splitlines() if line.startswith("|"))
    numbers = re.findall(rf"{_N}[x%]?", figure)
    return all(re.search(rf"(?<![\w.]){re.escape(number)}(?![\w.%])", cells) for number in numbers)


def unsourced(path: Path, text: str) -> list[str]:
    """Return the figures of a page that none of the sections states to which its own section links."""
    missing = []
    for anchor, body in sections(text):
        links = re.findall(r"\]\(([^)#\s]*)#([\w-]+)\)", body)
        sources = [SOURCES.get(((path.parent / target).resolve(), name), "") for target, name in links]
        missing += [f"#{anchor}: {f}" for f in quoted(body) if not any(states(source, f) for source in sources)]
    return missing


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_links_to_the_section_that_states_its_figures(path):
    text = path.read_text().replace(tables(), "")
    assert unsourced(path, text) == [], (
        "state them in tests/benchmarks/README.md and link to that section, or put what nobody measured in backticks"
    )


def test_the_check_knows_figures_and_finds_changed_ones(monkeypatch):
    text = "It is 1.8x to 2.6x faster, takes 24 s and 1,024 MB, .9797 instead of **0.9624**; at least 20 dB, 2.13, x 4."
    figures = ["1.8x to 2.6x faster", "24 s", "1024 MB", ".9797", "0.9624"]
    ((_, body),) = sections(f"# A\n{text}")
    assert quoted(body) == figures
    monkeypatch.setitem(SOURCES, (BENCHMARKS, "a"), "1.8x to 2.6x faster, 1024 MB\n| a | 24 | .9797 | 0.9624 |\n")
    page = f"# B\n[measured](tests/benchmarks/README.md#a): {body}"
    assert unsourced(ROOT / "README.md", page) == []
    for figure, other in (("2.6x", "2.7x"), ("1.8x to ", ""), ("24 s", "25 s"), ("1024", "1,025"), (".9797", ".9798")):
        assert len(unsourced(ROOT / "README.md", page.replace(figure, other))) == 1
    assert len(unsourced(ROOT / "README.md", page.replace("#a", "#b"))) == len(figures)
