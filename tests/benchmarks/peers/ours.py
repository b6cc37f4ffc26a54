"""This project: rounded to nearest, or by a preset of `pt2mx.optimize`."""

from __future__ import annotations

import torch

import pt2mx
from tests.benchmarks.accuracy.smollm2 import Logits, quantizer
from tests.benchmarks.peers.process import Job, run


def quantize(job: Job) -> None:
    shapes = ({0: torch.export.Dim("batch")},)
    model = torch.export.export(Logits(job.model), (job.tokens[:2],), dynamic_shapes=shapes).module()
    chosen = quantizer(job.format, "even")
    if job.method != "nearest":
        batches = [(batch,) for batch in job.tokens.split(2)]
        model = pt2mx.optimize(model, chosen, batches, preset=job.method)
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, chosen))
    program = torch.export.export(converted, (job.tokens[:2],), dynamic_shapes=shapes)
    pt2mx.save_program(program, job.output.with_suffix(".pt2"))


if __name__ == "__main__":
    run(quantize)
