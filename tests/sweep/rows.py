"""One row of the table that `python -m tests.sweep` prints."""

import time

import pt2mx
from tests.sweep.stages import NEEDED, STAGES, Flow, least_cosine
from tests.sweep.table import ARCHITECTURES, RECIPES

#: name, cells, stage -> cause of its failure
Row = tuple[str, tuple[str, ...], dict[str, str]]


def row(name: str, stages: tuple[str, ...]) -> Row:
    """One architecture through these stages."""
    start = time.perf_counter()
    flow, reached = _run(name, stages)
    marks = ["" if s not in reached else "fails" if reached[s] else "ok" for s in STAGES]
    seconds = f"{time.perf_counter() - start:.0f}"
    cells = (name, ARCHITECTURES[name].kind, RECIPES[name], *marks, *_figures(flow), seconds)
    return name, cells, {stage: cause for stage, cause in reached.items() if cause}


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
