"""This project: rounded to nearest, by a preset of `pt2mx.optimize`, or by algorithms whose result checkpoints hold."""

import torch
from torch import nn

import pt2mx
from tests.benchmarks.accuracy.case import ALGORITHMS
from tests.benchmarks.peers.models import MODELS
from tests.benchmarks.peers.process import Job, run


def quantize(job: Job) -> nn.Module:
    subject, inputs = MODELS[job.model_name], job.inputs.to(job.device)
    shapes = ({0: torch.export.Dim("batch", max=1024)},)
    wrapped = subject.wrap(job.model.to(job.device))
    model = torch.export.export(wrapped, (inputs[:2],), dynamic_shapes=shapes).module()
    quantizer = subject.quantizer(job.format, "even")
    if job.setting != "nearest":
        batches = [(batch,) for batch in inputs.split(subject.at_once)]
        algorithms = ALGORITHMS.get(job.setting)
        model = pt2mx.optimize(
            model, quantizer, batches, algorithms=algorithms, preset=None if algorithms else job.setting
        )
    return pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, quantizer))


if __name__ == "__main__":
    run(quantize)
