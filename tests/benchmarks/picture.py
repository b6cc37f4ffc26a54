"""The picture of README.md: size against loss of recipes, `configs/measured.json` as SVG.

Each task has a panel. Its points are recipes that round to nearest, and the task's own recipes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

#: recipe -> label of those that round to nearest; a task's own are NAME_smallest, NAME_balanced and NAME_best
NEAREST = {
    "mxfp4": "FP4",
    "mxfp4_weight_only": "FP4, weights only",
    "mxfp6": "FP6",
    "mxfp8": "FP8",
    "mxint8": "INT8",
}
OWN = ("smallest", "balanced", "best")
_LOSS = {"cosine": "1 - cosine", "perplexity": "rise of log-perplexity"}
_TITLES = {"encoder": "Sentence encoder", "cnn": "CNN", "decoder": "Language model"}
#: pixels: a panel, its margins, the picture's height
_WIDTH, _LEFT, _TOP, _BOTTOM, _HEIGHT = 320, 56, 62, 46, 330
_BITS, _GREY, _BLUE = (3.7, 11.7), "#8b949e", "#0969da"


def picture(tasks: dict[str, Any]) -> str:
    """Return the SVG.

    Args:
        tasks: what `configs/measured.json` holds.
    """
    width = _WIDTH * len(tasks)
    parts = [part for i, (name, task) in enumerate(tasks.items()) for part in _panel(i * _WIDTH, name, task)]
    legend = [
        f'<circle cx="{_LEFT}" cy="14" r="4" fill="{_GREY}"/>{_text(_LEFT + 9, 18, "rounded to nearest")}',
        f'<circle cx="{_LEFT + 130}" cy="14" r="4" fill="{_BLUE}"/>{_text(_LEFT + 139, 18, "recipe of the task")}',
    ]
    style = "font-family:system-ui,sans-serif;font-size:11px;fill:#1f2328"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" style="{style}">'
    background = f'<rect width="{width}" height="{_HEIGHT}" rx="6" fill="#fff"/>'
    return "\n".join([head, background, *legend, *parts, "</svg>", ""])


def _panel(left: int, name: str, task: dict[str, Any]) -> Iterator[str]:
    recipes = task["recipes"]
    labels = {**NEAREST, **{f"{name}_{size}": f"{name}_{size}" for size in OWN}}
    points = {label: recipes[recipe] for recipe, label in labels.items()}
    losses = [point["loss"] for point in points.values()]
    low, high = math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses)))
    right, bottom = left + _WIDTH - 12, _HEIGHT - _BOTTOM

    def x(bits: float) -> float:
        return left + _LEFT + (bits - _BITS[0]) / (_BITS[1] - _BITS[0]) * (right - left - _LEFT)

    def y(loss: float) -> float:
        return bottom - (math.log10(loss) - low) / (high - low) * (bottom - _TOP)

    yield _text(left + _LEFT, 40, f"{_TITLES[name]}: {task['model']}", weight=600)
    yield _text(left + _LEFT, 54, f"loss, {_LOSS[task['metric']]}")
    for power in range(low, high + 1):
        yield f'<path d="M{left + _LEFT} {y(10**power):.1f}H{right}" stroke="#d1d9e0"/>'
        yield _text(left + _LEFT - 6, y(10**power) + 4, f"{10**power:g}", anchor="end")
    for bits in range(4, 10):
        yield _text(x(bits), bottom + 16, str(bits), anchor="middle")
    yield _text((left + _LEFT + right) / 2, bottom + 34, "bits per value", anchor="middle")
    for label, point in points.items():
        color = _GREY if label in NEAREST.values() else _BLUE
        yield f'<circle cx="{x(point["bits"]):.1f}" cy="{y(point["loss"]):.1f}" r="4" fill="{color}"/>'
    taken: list[tuple[float, float, float]] = []  # left, right and height of each label
    for label, point in sorted(points.items(), key=lambda item: item[1]["loss"]):
        begin, height = x(point["bits"]) + 8, y(point["loss"]) + 4
        end = begin + 6 * len(label)
        while any(abs(height - other) < 12 and begin < right and end > left for left, right, other in taken):
            height -= 1  # above the labels of smaller losses
        taken.append((begin, end, height))
        yield _text(begin, height, label)


def _text(x: float, y: float, text: str, anchor: str = "start", weight: int = 400) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
