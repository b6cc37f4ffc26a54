"""This project: rounded to nearest, or by a preset of `pt2mx.optimize`."""

from __future__ import annotations

import torch

import pt2mx
from tests.benchmarks.peers.models import MODELS
from tests.benchmarks.peers.process import Job, run


def quantize(job: Job) -> None:
    subject = MODELS[job.model_name]
    shapes = ({0: torch.export.Dim("batch")},)
    model = torch.export.export(subject.wrap(job.model), (job.tokens[:2],), dynamic_shapes=shapes).module()
    quantizer = subject.quantizer(job.format, "even")
    if job.method != "nearest":
        batches = [(batch,) for batch in job.tokens.split(2)]
        model = pt2mx.optimize(model, quantizer, batches, preset=job.method)
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, quantizer))
    program = torch.export.export(converted, (job.tokens[:2],), dynamic_shapes=shapes)
    pt2mx.save_program(program, job.output.with_suffix(".pt2"))


if __name__ == "__main__":
    run(quantize)
