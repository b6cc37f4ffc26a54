"""The shipped recipes: their names, and how they measured. This module imports no torch: `--help` names the recipes."""

from __future__ import annotations

import json
from importlib import resources
from typing import TypedDict


def names() -> list[str]:
    """Return the names of the recipes that pt2mx ships."""
    folder = resources.files("pt2mx.configs")
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


class Measured(TypedDict):
    """A recipe on the model of a task.

    `bits` a value of all parameters, `size` over that in float32, `quality` as the task's metric has it, `loss` of it
    (1 - mean cosine, or what log-perplexity rises by), `seconds` of rounding, preparing and converting on a core.
    """

    bits: float
    size: float
    quality: str
    loss: float
    seconds: float


class Task(TypedDict):
    """A task: the model that stands for it, its metric, the metric of the float model, and the recipes."""

    model: str
    metric: str
    float: str
    recipes: dict[str, Measured]


def tasks() -> dict[str, Task]:
    """The tasks by name: encoder, cnn, decoder."""
    measured = resources.files("pt2mx.configs").joinpath("measured.json").read_text(encoding="utf-8")
    content: dict[str, Task] = json.loads(measured)
    return content


def table(task: Task) -> str:
    """The recipes of a task in Markdown, the smallest first, and of one size the best."""
    ordered = sorted(task["recipes"].items(), key=lambda row: (row[1]["size"], row[1]["loss"]))
    lines = [
        f"| recipe | bits | of float32 | {task['metric']} (float {task['float']}) | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, found in ordered:
        cells = (
            f"`{name}`",
            f"{found['bits']:.2f}",
            f"{found['size']:.3f}x",
            found["quality"],
            f"{found['seconds']:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(name: str) -> str:
    """The measurements of a recipe in a line; "" where there are none."""
    found = [
        (task, content, content["recipes"][name]) for task, content in tasks().items() if name in content["recipes"]
    ]
    return "; ".join(f"{t} {row['bits']:.2f} bits, {content['metric']} {row['quality']}" for t, content, row in found)
