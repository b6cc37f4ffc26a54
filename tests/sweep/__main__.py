"""Every architecture through every stage, as a Markdown table with the commit and the causes of failures.

    python -m tests.sweep [--compile some|all|none] [--jobs N] [--output FILE] [NAME ...]

About a quarter of an hour on two cores that are otherwise idle; the share that is compiled comes on top. `make sweep`
writes `tests/sweep/results.md`.
"""

import argparse
import multiprocessing
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from pt2mx.extras import import_extra
from pt2mx.pt2e.files.output import whole_file
from tests.sweep.rows import Row, row
from tests.sweep.stages import STAGES
from tests.sweep.table import ARCHITECTURES, COMPILED

_FIGURES = ("quantized", "not quantized", "cosine to float", "of compiled", "seconds")
_HEADER = ("architecture", "kind", "recipe", *STAGES, *_FIGURES)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES), metavar="NAME", help="by default all")
    parser.add_argument("--compile", choices=("some", "all", "none"), default="some", help="by default some")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each where there are several")
    parser.add_argument("--output", metavar="FILE", help="receives the table too, when it is complete")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(ARCHITECTURES):
        parser.error(f"no architecture {sorted(unknown)[0]!r} in tests/sweep")
    lines, failed = [], False
    for line in _lines(options):
        print(line, flush=True)
        lines.append(f"{line}\n")
        failed |= line.startswith("- ")
    if options.output is not None:
        with whole_file(options.output) as file:
            file.write("".join(lines).encode())
    return int(failed)


def _lines(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table as they become known: the head, the rows, a summary, an item for each failure."""
    yield from (f"At commit {_commit()}.", "", _cells(_HEADER), _cells(["---"] * len(_HEADER)))
    causes: dict[tuple[str, str], str] = {}
    for name, cells, failures in _rows(options):
        causes |= {(name, stage): cause for stage, cause in failures.items()}
        yield _cells(cells)
    whole = len(options.names) - len({name for name, _ in causes})
    libraries = [("torchvision", "vision"), ("transformers", "hf")]
    versions = [f"{name} {import_extra(name, extra).__version__}" for name, extra in libraries]
    yield from (
        "",
        f"{whole} of {len(options.names)} architectures go through all stages (`--compile {options.compile}`).",
    )
    yield f"torch {torch.__version__}, {', '.join(versions)}, {options.jobs} processes, {platform.machine()}."
    yield from ("", *(f"- {name}, {stage}: {cause}" for (name, stage), cause in causes.items())) if causes else ()


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    """(name, cells, stage -> cause of its failure) of each architecture, in their order."""
    compiled = {"some": COMPILED, "all": ARCHITECTURES, "none": ()}[options.compile]
    stages = [STAGES if name in compiled else STAGES[:-1] for name in options.names]
    if options.jobs == 1:
        yield from map(row, options.names, stages)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(row, options.names, stages)


def _commit() -> str:
    """Return the commit of the sources, and whether they were changed since; results are no source."""
    try:
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/sweep/results.md")
        return _git("rev-parse", "HEAD") + (", with uncommitted changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown: git knows no repository here"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parents[2]), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
