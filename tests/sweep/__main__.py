"""Every architecture through every stage, as a Markdown table with the causes of failures.

    python -m tests.sweep [--eager] [NAME ...] > tests/sweep/results.md

About a quarter of an hour on two cores that are otherwise idle; the share that is compiled comes on top.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence

import torch

import pt2mx
from pt2mx.extras import import_extra
from tests.sweep.stages import NEEDED, STAGES, Flow, least_cosine
from tests.sweep.table import ARCHITECTURES, COMPILED, RECIPES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES), metavar="NAME", help="by default all")
    parser.add_argument("--eager", action="store_true", help="compile none")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ARCHITECTURES):
        parser.error(f"no architecture {sorted(unknown)[0]!r} in tests/sweep")
    compiled = () if options.eager else COMPILED
    figures = ("quantized", "left alone", "cosine to float", "of compiled", "seconds")
    header = ("architecture", "kind", "recipe", *STAGES, *figures)
    _print(header)
    _print(["---"] * len(header))
    causes = {}
    for name in options.names:
        start = time.perf_counter()
        flow, reached = _run(name, STAGES if name in compiled else STAGES[:-1])
        causes |= {(name, stage): cause for stage, cause in reached.items() if cause}
        marks = ["" if s not in reached else "fails" if reached[s] else "ok" for s in STAGES]
        seconds = f"{time.perf_counter() - start:.0f}"
        _print((name, ARCHITECTURES[name].kind, RECIPES[name], *marks, *_figures(flow), seconds))
    failed = {name for name, _ in causes}
    libraries = [("torchvision", "vision"), ("transformers", "hf")]
    versions = [f"{name} {import_extra(name, extra).__version__}" for name, extra in libraries]
    print(f"\n{len(options.names) - len(failed)} of {len(options.names)} architectures go through all stages.")
    print(
        f"torch {torch.__version__}, {', '.join(versions)}, {torch.get_num_threads()} threads, {platform.machine()}.\n"
    )
    for (name, stage), cause in causes.items():
        print(f"- {name}, {stage}: {cause}")
    return min(len(causes), 1)


def _run(name: str, stages: tuple[str, ...]) -> tuple[Flow, dict[str, str]]:
    """The flow as far as it went, and for each stage that it reached the cause of its failure, "" if there is none."""
    flow, causes = Flow(ARCHITECTURES[name], RECIPES[name]), {}
    for stage in stages:
        try:
            getattr(flow, stage)()
            causes[stage] = ""
        except Exception as error:  # whatever torch, a library or an assertion raises is a result here
            causes[stage] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if stage in NEEDED:
                break
    return flow, causes


def _figures(flow: Flow) -> tuple[str, ...]:
    if flow.converted is None:
        return "", "", "", ""
    operators = pt2mx.quantization_report(flow.converted).operators
    quantized = sum(operator.quantized for operator in operators)
    cosine = f"{least_cosine(flow.quantized, flow.unquantized):.3f}" if flow.quantized else ""
    compiled = "" if flow.cosine is None else f"{flow.cosine:.5f}"
    return str(quantized), str(len(operators) - quantized), cosine, compiled


def _print(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
