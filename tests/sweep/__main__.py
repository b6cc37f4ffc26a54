"""Every architecture through every stage, as a Markdown table with the causes of failures.

    python -m tests.sweep [--skip compile] [NAME ...] > tests/sweep/results.md

An hour on two cores, most of it in torch.compile.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time

import torch

import pt2mx
from pt2mx.extras import import_extra
from tests.sweep.stages import NEEDED, STAGES, Flow, least_cosine
from tests.sweep.table import ARCHITECTURES, RECIPES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ARCHITECTURES), metavar="NAME", help="by default all")
    parser.add_argument("--skip", nargs="*", default=[], choices=STAGES[len(NEEDED) :], help="stages to leave out")
    options = parser.parse_args()
    stages = [stage for stage in STAGES if stage not in options.skip]
    causes = {}
    _print("architecture", "kind", "recipe", *stages, "quantized", "listed", "cosine to float", "compiled", "s")
    _print(*["---"] * (8 + len(stages)))
    for name in options.names:
        start = time.perf_counter()
        flow, failures = _run(name, stages)
        causes |= {(name, stage): cause for stage, cause in failures.items()}
        last = stages.index(next((s for s in failures if s in NEEDED), stages[-1]))
        marks = ["fails" if s in failures else "ok" if i <= last else "" for i, s in enumerate(stages)]
        seconds = f"{time.perf_counter() - start:.0f}"
        _print(name, ARCHITECTURES[name].kind, RECIPES[name], *marks, *_figures(flow), seconds)
    failed = {name for name, _ in causes}
    versions = [f"{p} {import_extra(p, e).__version__}" for p, e in (("torchvision", "vision"), ("transformers", "hf"))]
    print(f"\n{len(options.names) - len(failed)} of {len(options.names)} architectures go through all stages. torch")
    print(f"{torch.__version__}, {', '.join(versions)}, {torch.get_num_threads()} threads, {platform.machine()}.\n")
    for (name, stage), cause in causes.items():
        print(f"- {name}, {stage}: {cause}")
    return min(len(causes), 1)


def _run(name: str, stages: list[str]) -> tuple[Flow, dict[str, str]]:
    """The flow as far as it went, and the cause of each stage's failure."""
    flow, failures = Flow(ARCHITECTURES[name], RECIPES[name]), {}
    for stage in stages:
        try:
            getattr(flow, stage)()
        except Exception as error:  # whatever torch, a library or an assertion raises is a result here
            failures[stage] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            if stage in NEEDED:
                break
    return flow, failures


def _figures(flow: Flow) -> tuple[str, ...]:
    if flow.converted is None:
        return "", "", "", ""
    operators = pt2mx.quantization_report(flow.converted).operators
    quantized = sum(operator.quantized for operator in operators)
    cosine = f"{least_cosine(flow.quantized, flow.unquantized):.3f}" if flow.quantized else ""
    compiled = "" if flow.cosine is None else f"{flow.cosine:.5f}"
    return str(quantized), str(len(operators) - quantized), cosine, compiled


def _print(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
