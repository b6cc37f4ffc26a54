"""The shipped recipes: their names, and how they measured. This module imports no torch: `--help` names the recipes."""

from __future__ import annotations

import json
import os
import re
from importlib import resources
from typing import TypedDict

from pt2mx.errors import MXError, nearest
from pt2mx.formats import NV_SPELLINGS, REGISTERED, SPELLINGS, is_element


def names() -> list[str]:
    """Return the names of the recipes that pt2mx ships."""
    folder = resources.files("pt2mx.configs")
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def check_source(source: str) -> None:
    """Raise an `MXError` for what names no recipe: no file, no shipped recipe in upper or lower case, and no format."""
    element = re.split(r"[{(]", source.lower())[0].strip()
    is_format = is_element(element.removeprefix("nv")) or element.startswith("bfp")
    if not (is_format or source.lower() in names() or os.path.isfile(source)):
        allowed = dict.fromkeys([*names(), *SPELLINGS, *NV_SPELLINGS, *REGISTERED])
        raise MXError(f"no recipe {source!r}: no file, shipped recipe or format: {nearest(source, allowed)}")


class Measured(TypedDict):
    """The measurements of a recipe on the model of a task.

    `bits` per value over all parameters; `size` relative to float32; `quality` in the task's metric; `loss` of quality
    (1 - mean cosine, the increase of log-perplexity, or the word error rate); `seconds` to round, prepare and convert
    on one core.
    """

    bits: float
    size: float
    quality: str
    loss: float
    seconds: float


class Task(TypedDict):
    """A task: its model, its metric, the metric of the float model, and the recipes."""

    model: str
    metric: str
    float: str
    recipes: dict[str, Measured]


def tasks() -> dict[str, Task]:
    """Return the tasks by name: encoder, cnn, decoder, asr."""
    measured = resources.files("pt2mx.configs").joinpath("measured.json").read_text(encoding="utf-8")
    content: dict[str, Task] = json.loads(measured)
    return content


def task_of(name: str) -> str | None:
    """Return the task that a shipped recipe is for; None: a recipe for any model.

    Example:
        >>> from pt2mx.pt2e.quantizer import shipped
        >>> shipped.task_of("mxfp4_decoder"), shipped.task_of("mxfp4")
        ('decoder', None)
    """
    words = name.lower().split("_") if name.lower() in names() else []
    return next((task for task in tasks() if task in words), None)


def table(task: Task) -> str:
    """Return the recipes of a task as a Markdown table, the smallest first, then the best."""
    ordered = sorted(task["recipes"].items(), key=lambda row: (row[1]["size"], row[1]["loss"]))
    lines = [
        f"| recipe | bits | of float32 | {task['metric']} (float {task['float']}) | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, row in ordered:
        cells = (
            f"`{name}`",
            f"{row['bits']:.2f}",
            f"{row['size']:.3f}x",
            row["quality"],
            f"{row['seconds']:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(name: str) -> str:
    """Return the measurements of a recipe in a line; "" where there are none."""
    rows = [
        (task, content, content["recipes"][name]) for task, content in tasks().items() if name in content["recipes"]
    ]
    return "; ".join(f"{t} {row['bits']:.2f} bits, {content['metric']} {row['quality']}" for t, content, row in rows)
