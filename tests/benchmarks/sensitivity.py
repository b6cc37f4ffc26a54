"""Sensitivity of MiniLM's output, and the mixed recipes that follow from it.

    python -m tests.benchmarks.sensitivity

Seconds of `sensitivity` by runs and by backward passes, their agreement in rank, and the cosine to the float embeddings
of recipes of mixed weights at 4.5, 5 and 6 bits a value, chosen by the noise of tensors and by the output. The choice
sees 72 sentences, the cosine is that of others.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn import functional as F

import pt2mx
from pt2mx.pt2e.cli.models import load_minilm
from pt2mx.pt2e.cli.sentences import sentences as built_in
from pt2mx.pt2e.sensitivity.result import Sensitivity, SensitivityRow
from tests.benchmarks.accuracy.texts import sentences
from tests.benchmarks.measure import Row, hardware, print_table

CANDIDATES = ("mxfp4", "mxfp6", "mxfp8", "mxint8")
OPERANDS = ("weights", "activations", "both")
BITS = (4.5, 5.0, 6.0)


def main() -> None:
    encoder, tokenize = load_minilm()
    texts, others = built_in(), sentences()[:288]
    batches, held_out = ([tokenize(t[i : i + 12]) for i in range(0, len(t), 12)] for t in (texts, others))
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
    exported = torch.export.export(encoder, batches[0], dynamic_shapes=(shape, shape)).module()

    begin = time.perf_counter()
    measured = pt2mx.sensitivity(exported, batches, CANDIDATES, metric="cosine", operands=OPERANDS)
    middle = time.perf_counter()
    options: dict[str, Any] = {"metric": "cosine", "operands": OPERANDS, "method": "gradient"}
    estimated = pt2mx.sensitivity(exported, batches, CANDIDATES, **options)
    print(f"runs {middle - begin:.0f} s, backward passes {time.perf_counter() - middle:.0f} s")
    rows: list[Row] = []
    for candidate in CANDIDATES:
        for operands in OPERANDS:
            alone, estimates = measured.of(candidate, operands), estimated.of(candidate, operands)
            both = [
                SensitivityRow(name, candidate, operands, row.alone, row.left, estimates[name].estimate)
                for name, row in alone.items()
                if name in estimates
            ]
            agreement = Sensitivity("cosine", tuple(both), {}).agreement(candidate, operands)
            total = sum(row.cost for row in alone.values())
            rows.append(
                {"format": candidate, "operands": operands, "rank": agreement, "sum of modules": f"{total:.5f}"}
            )
            rows[-1]["whole"] = f"{measured.whole[candidate]:.5f}" if operands == "both" else ""
    print_table(rows, tuple(rows[0]))

    observer = pt2mx.MXFormatObserver.with_args(candidates=CANDIDATES)
    config = pt2mx.MXQuantizationConfig(weight="mxfp8", observer=observer)
    prepared = pt2mx.prepare_pt2e(exported, pt2mx.MXQuantizer().set_global(config))
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    rows = []
    for bits in BITS:
        row: Row = {"bits": bits}
        for name, found in (("tensors", None), ("output", measured), ("output, estimated", estimated)):
            objective = "tensors" if found is None else "output"
            quantizer = pt2mx.suggest_config(prepared, bits, objective=objective, sensitivity=found)
            model = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))
            row[name] = f"{_cosine(model, exported, held_out):.5f}"
        rows.append(row)
    print_table(rows, tuple(rows[0]))
    print(hardware())


def _cosine(model: Any, exported: Any, batches: list[Any]) -> float:
    with torch.no_grad():
        cosines = [F.cosine_similarity(model(*batch), exported(*batch)) for batch in batches]
    return torch.cat(cosines).mean().item()


if __name__ == "__main__":
    main()
