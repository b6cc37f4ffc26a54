"""The picture of README.md: the table of peers there as bars, `configs/measured.svg`.

    python -m tests.benchmarks.picture

It shows few words in large type, which can be read where a page is 390 pixels wide.
"""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "configs" / "measured.svg"
#: column of the table -> title of its panel
_PANELS = {
    2: "SmolLM2-135M, FP4 weights: KL divergence",
    3: "the same, FP8 activations",
    4: "the same, FP4 activations",
}
#: units: the picture, the begin and the longest of the bars, a row, a panel's title
_WIDTH, _LEFT, _LONGEST, _ROW, _TITLE = 560, 190, 294, 26, 44
_GREY, _BLUE = "#8b949e", "#0969da"
_LOSS = re.compile(r"\d?\.\d+")


def picture() -> str:
    """Return the SVG."""
    rows = _table((ROOT / "README.md").read_text())
    parts = [_text(8, 26, "Loss, less is better", size=17)]
    top = 30
    for column, title in _PANELS.items():
        losses = {row[0].strip("*"): float(loss[0]) for row in rows if (loss := _LOSS.search(row[column]))}
        parts += _panel(top, title, losses)
        top += _TITLE + _ROW * len(losses)
    style = "font-family:system-ui,sans-serif;fill:#1f2328"
    size = f'width="480" viewBox="0 0 {_WIDTH} {top + 12}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">'
    background = '<rect width="100%" height="100%" rx="6" fill="#fff"/>'
    return "\n".join([head, background, *parts, "</svg>", ""])


def _table(text: str) -> list[list[str]]:
    """Return the cells of the table whose first row is of pt2mx."""
    lines = text[text.index("| **pt2mx** |") :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def _panel(top: int, title: str, losses: dict[str, float]) -> Iterator[str]:
    """Draw a panel: a bar for each tool, the smallest loss first."""
    yield _text(8, top + 32, title, weight=600)
    largest = max(losses.values())
    for i, (tool, loss) in enumerate(sorted(losses.items(), key=lambda item: item[1])):
        y, width = top + _TITLE + i * _ROW, _LONGEST * loss / largest
        color = _BLUE if tool.startswith("pt2mx") else _GREY
        yield _text(_LEFT - 8, y + 17, tool, anchor="end")
        yield f'<rect x="{_LEFT}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 8}" fill="{color}"/>'
        yield _text(_LEFT + width + 8, y + 17, f"{loss:.4f}".removeprefix("0"))


def _text(x: float, y: float, text: str, anchor: str = "start", weight: int = 400, size: int = 17) -> str:
    place = f'x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" font-size="{size}"'
    return f"<text {place}>{escape(text)}</text>"


if __name__ == "__main__":
    PICTURE.write_text(picture())
