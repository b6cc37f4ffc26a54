"""Every architecture through every stage, as a Markdown table with the causes of failures.

    python -m tests.sweep [--compile some|all|none] [--jobs N] [NAME ...] > tests/sweep/results.md

About a quarter of an hour on two cores that are otherwise idle; the share that is compiled comes on top.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from pt2mx.extras import import_extra
from tests.sweep.rows import Row, row
from tests.sweep.stages import STAGES
from tests.sweep.table import ARCHITECTURES, COMPILED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES), metavar="NAME", help="by default all")
    parser.add_argument("--compile", choices=("some", "all", "none"), default="some", help="by default some")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each where there are several")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ARCHITECTURES):
        parser.error(f"no architecture {sorted(unknown)[0]!r} in tests/sweep")
    compiled = {"some": COMPILED, "all": ARCHITECTURES, "none": ()}[options.compile]
    stages = [STAGES if name in compiled else STAGES[:-1] for name in options.names]
    figures = ("quantized", "left alone", "cosine to float", "of compiled", "seconds")
    header = ("architecture", "kind", "recipe", *STAGES, *figures)
    _print(header)
    _print(["---"] * len(header))
    causes: dict[tuple[str, str], str] = {}
    for name, cells, failures in _rows(options.names, stages, options.jobs):
        causes |= {(name, stage): cause for stage, cause in failures.items()}
        _print(cells)
    failed = {name for name, _ in causes}
    libraries = [("torchvision", "vision"), ("transformers", "hf")]
    versions = [f"{name} {import_extra(name, extra).__version__}" for name, extra in libraries]
    print(f"\n{len(options.names) - len(failed)} of {len(options.names)} architectures go through all stages.")
    print(f"torch {torch.__version__}, {', '.join(versions)}, {options.jobs} processes, {platform.machine()}.\n")
    for (name, stage), cause in causes.items():
        print(f"- {name}, {stage}: {cause}")
    return min(len(causes), 1)


def _rows(names: Sequence[str], stages: Sequence[tuple[str, ...]], jobs: int) -> Iterator[Row]:
    """(name, cells, stage -> cause of its failure) of each architecture, in their order."""
    if jobs == 1:
        yield from map(row, names, stages)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(row, names, stages)


def _print(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
