"""The pages made of `measured.json`: `results.md`, and the table and the picture of the project's README.

    python -m tests.benchmarks.peers.page

`python -m tests.benchmarks.peers --record` writes the file.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.methods import METHODS
from tests.benchmarks.peers.outcomes import OURS, OVER
from tests.benchmarks.peers.recorded import with_recorded
from tests.benchmarks.picture import PICTURE, picture

FOLDER = Path(__file__).parent
MEASURED, RESULTS, README = FOLDER / "measured.json", FOLDER / "results.md", FOLDER.parents[2] / "README.md"
#: model -> its title in `results.md`
TITLES = {
    "smollm2": "SmolLM2-135M-Instruct, whose package holds 4-bit codes",
    "smollm2-continued": "SmolLM2-135M-Instruct, trained further in bfloat16",
    "coder": "Qwen2.5-Coder-1.5B-Instruct, whose packages hold codes of 5.0 bits",
    "minilm": "MiniLM",
    "efficientnet-lite0": "EfficientNet-Lite0",
    "efficientnet-lite1": "EfficientNet-Lite1",
}
#: the columns of README's table: head, model, format
COLUMNS = (
    ("SmolLM2, W4", "smollm2", "W4"),
    ("W4A8", "smollm2", "W4A8"),
    ("W4A4", "smollm2", "W4A4"),
    ("MiniLM, W4", "minilm", "W4"),
    ("W4A8", "minilm", "W4A8"),
    ("W4A4", "minilm", "W4A4"),
)
#: row of README's table -> its methods, and what ran files of it here
ROWS = {
    "**pt2mx**": (("pt2mx",), "torch, onnxruntime"),
    "pt2mx, checkpoints": (("pt2mx, checkpoints",), "vLLM 0.26.0"),
    "AutoRound 0.16": (("AutoRound",), "not tried"),
    "Brevitas 0.13": (("Brevitas", "Brevitas CNN"), "not tried"),
    "llm-compressor 0.14": (("llm-compressor",), "not tried"),
    "ModelOpt 0.47": (("ModelOpt",), "not tried"),
    "NNCF 3.4": (("NNCF", "NNCF INT8"), "not tried"),
    "Quark 0.13": (("Quark", "Quark ONNX"), "not tried"),
    "torchao 0.18": (("torchao", "torchao INT8"), "not tried"),
}
#: the mark of a loss whose linear layers rotate their inputs
ROTATES = "°"
_INTRODUCTION = """# Peers at 4 bits: all settings

`python -m tests.benchmarks.peers.page` makes this page of `measured.json`.
[The benchmarks](../README.md#peers-at-4-bits) say how the figures were measured.
"""
BEGIN, END = "<!-- peers: made by tests.benchmarks.peers.page -->\n", "<!-- end of peers -->\n"


def record(model: str, entry: Mapping[str, Any]) -> None:
    """Write the entry of a model into `measured.json`, with a line for each row; recorded settings that it lacks stay.

    Args:
        model: its name.
        entry: `windows`, `float`, the rows of `best` and of `all`, and `refusals`.
    """
    measured = _measured()
    measured[model] = with_recorded(entry, measured[model]) if model in measured else entry
    parts = [f'"{name}": {{\n{_lines(kept)}\n}}' for name, kept in sorted(measured.items())]
    MEASURED.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _measured() -> dict[str, Any]:
    return json.loads(MEASURED.read_text()) if MEASURED.exists() else {}


def _lines(entry: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        if not isinstance(value, list):
            return json.dumps(value)
        return "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"

    return ",\n".join(f'"{key}": {text(value)}' for key, value in entry.items())


def results() -> str:
    """Return the text of `results.md`."""
    measured = _measured()
    sections = (_section(title, measured[name]) for name, title in TITLES.items() if name in measured)
    return "\n".join([_INTRODUCTION, _nearest_peers(measured), *sections])


def _nearest_peers(measured: Mapping[str, Any]) -> str:
    """Return the table of pt2mx beside the nearest peer, for each model and format that a peer has."""
    rows: list[dict[str, str]] = []
    for model, title in TITLES.items():
        best = measured.get(model, {"best": []})["best"]
        for name in dict.fromkeys(row["format"] for row in best):
            same = [row for row in best if row["format"] == name]
            ours = [row for row in same if row["method"] == OURS]
            peers = [row for row in same if not row["method"].startswith(OURS)]
            if ours and peers:
                peer = min(peers, key=_loss)
                chosen = {"nearest peer": f"{peer['method']}, {peer['setting']}", "its loss": f"{_loss(peer):.4f}"}
                cell = {"model": title, "format": name, OURS: f"{_loss(ours[0]):.4f}", **chosen}
                rows.append({**cell, OVER: peer.get(OVER, ""), "seconds": f"{ours[0]['seconds']} / {peer['seconds']}"})
    apart = sum(row[OVER].partition("(")[2].startswith("+") for row in rows)
    text = (
        "By more than the interval pt2mx is nearer to the float model than every peer that ran in "
        f"{apart} of {len(rows)} rows; each has its best setting by validation. Seconds, of pt2mx and the peer, "
        "compare on one machine alone."
    )
    return f"## The nearest peer\n\n{text}\n\n{_table(rows)}\n"


def _section(title: str, entry: Mapping[str, Any]) -> str:
    parts = [f"## {title}", f"{entry['windows']} windows for the test. The best setting of each method by validation:"]
    parts += [_table([entry["float"], *entry["best"]]), "All settings:", _table(entry["all"])]
    if entry["refusals"]:
        runs = defaultdict(list)
        for run, error in entry["refusals"].items():
            runs[error].append(run.removesuffix(", seed 0"))
        parts += ["Refused:", "\n".join(f"- {'; '.join(names)}: `{error}`" for error, names in runs.items())]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = list(dict.fromkeys(key for row in rows for key in row))
    lines = [header, ["---"] * len(header), *([str(row.get(key, "")) for key in header] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def readme_table() -> str:
    """Return the table of README.md: the loss of the best setting of each tool, with the best one in bold type."""
    columns = [_Column(model, name) for _, model, name in COLUMNS]
    header = ["", "its files ran in", *(head for head, _, _ in COLUMNS)]
    lines = [header, ["---"] * len(header)]
    for name, (methods, engines) in ROWS.items():
        lines.append([name, engines, *(column.cell(methods) for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


class _Column:
    """A model and a format: the losses of the best settings, whether they rotate inputs, and the methods that refused
    a setting."""

    def __init__(self, model: str, name: str) -> None:
        entry = _measured()[model]
        self.model = model
        rows = [row for row in entry["best"] if row["format"] == name]
        self.losses = {row["method"]: _loss(row) for row in rows}
        self.rotating = {row["method"] for row in rows if row["rotates inputs"] == "yes"}
        self.refusing = {run.split(", ")[1] for run in entry["refusals"] if run.startswith(f"{name}, ")}

    def cell(self, methods: Sequence[str]) -> str:
        """Return the best loss of these methods, or why there is none."""
        if known := [method for method in methods if method in self.losses]:
            best = min(known, key=self.losses.__getitem__)
            text = f"{self.losses[best]:.4f}".removeprefix("0")
            bold = f"**{text}**" if self.losses[best] == min(self.losses.values()) else text
            return bold + ROTATES * (best in self.rotating)
        if self.refusing.intersection(methods):
            return "refuses"
        return "not run" if any(self.model in METHODS[method].models for method in methods) else "no recipe"


def _loss(row: Mapping[str, Any]) -> float:
    """Return the mean loss of a row, which is before its interval."""
    return float(next(str(value) for key, value in row.items() if "95% interval" in key).split()[0])


def with_table(page: str) -> str:
    """Return the text of README.md with today's table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + readme_table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    RESULTS.write_text(results())
    README.write_text(with_table(README.read_text()))
    PICTURE.write_text(picture())
