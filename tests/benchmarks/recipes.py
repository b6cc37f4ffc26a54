"""Recipes by task: bits, bytes, quality and seconds, as `configs/measured.json` and the tables of `configs/` have them.

    python -m tests.benchmarks.recipes [--tasks encoder cnn decoder asr] [--recipes NAME_OR_FILE ...] [--write]

An encoder is all-MiniLM-L6-v2, a CNN EfficientNet-Lite0, a decoder SmolLM2-135M-Instruct with its head and embedding,
and speech is transcribed by Whisper base, each with pretrained weights (`accuracy/` describes the data for calibration
and evaluation). The recipe's algorithms round the weights; a decoder's cache stays in float. Seconds: optimizing,
preparing and converting.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

import pt2mx
from pt2mx import MXQuantizer
from pt2mx.pt2e.quantizer.shipped import summary, table, tasks
from tests.benchmarks.accuracy.case import Case, Figures
from tests.benchmarks.accuracy.models import MODELS
from tests.benchmarks.measure import Row, report, timed

#: task -> the model of `accuracy/`, its name, the metric
TASKS = {
    "encoder": ("minilm", "all-MiniLM-L6-v2", "cosine"),
    "cnn": ("efficientnet-lite0", "EfficientNet-Lite0", "cosine"),
    "decoder": ("smollm2", "SmolLM2-135M-Instruct", "perplexity"),
    "asr": ("whisper-base", "Whisper base", "word error rate"),
}
CONFIGS = Path(__file__).parents[2] / "configs"
MEASURED = CONFIGS / "measured.json"
_COMMENT = "# Measured: "


def measured(case: Case, chosen: MXQuantizer) -> dict[str, Any]:
    """Measure the size, quality and seconds of a recipe."""
    results: list[GraphModule] = []
    seconds = timed(lambda: results.append(case.by_recipe(chosen)))
    report = pt2mx.quantization_report(results[0])
    figures = case.figures(results[0])
    return {
        "bits": round(report.effective_bits, 2),
        "size": round(report.bytes_after / report.bytes_before, 3),
        "seconds": round(seconds, 1),
        "loss": round(figures.loss, 4),
        "quality": _quality(figures),
    }


def tables() -> str:
    """Return the tables of configs/README.md."""
    return "\n\n".join(f"### {name}: {task['model']}\n\n{table(task)}" for name, task in tasks().items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--recipes", nargs="+", help="names or files; by default those that were measured before")
    parser.add_argument("--write", action="store_true", help="update configs/measured.json and the comments of recipes")
    parser.add_argument(
        "--tables", action="store_true", help="print the tables of configs/README.md, and measure nothing"
    )
    options = parser.parse_args()
    if options.tables:
        print(tables())
        return
    rows: list[Row] = []
    for task in options.tasks:
        case = MODELS[TASKS[task][0]]()
        exact = _quality(case.figures(case.model))
        for name in options.recipes or tasks()[task]["recipes"]:
            figures = measured(case, MXQuantizer.from_recipe(name))
            rows.append({"task": task, "recipe": name, **figures})
            print(rows[-1], flush=True)
            if options.write:
                _keep(task, name, figures, exact)
    report(rows, ("task", "recipe", "bits", "size", "quality", "loss", "seconds"))


def _quality(figures: Figures) -> str:
    return re.split(r"[, ]", next(iter(figures.shown.values())))[0]


def _keep(task: str, name: str, figures: dict[str, Any], exact: str) -> None:
    content = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    rows = content.get(task, {}).get("recipes", {}) | {name: figures}
    _, model, metric = TASKS[task]
    content[task] = {"model": model, "metric": metric, "float": exact, "recipes": dict(sorted(rows.items()))}
    MEASURED.write_text(json.dumps({task: content[task] for task in TASKS if task in content}, indent=1) + "\n")
    comment(name)


def comment(name: str) -> None:
    """Write a recipe's measurements into its comment, where it is a shipped one."""
    path = CONFIGS / f"{name}.yaml"
    if path.is_file():
        kept = [row for row in path.read_text().splitlines() if not row.startswith(_COMMENT)]
        place = next(i for i, row in enumerate(kept) if not row.startswith("#"))
        path.write_text("\n".join([*kept[:place], f"{_COMMENT}{summary(name)}.", *kept[place:], ""]))


if __name__ == "__main__":
    main()
