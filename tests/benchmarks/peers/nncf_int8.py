"""NNCF: static INT8 of activations and weights, with its fast correction of biases, the only one for torch."""

from __future__ import annotations

import nncf
from torch import nn

from tests.benchmarks.peers.process import Job, run


def quantize(job: Job) -> nn.Module:
    data = nncf.Dataset(list(job.inputs.split(1)))
    return nncf.quantize(job.model, data, subset_size=len(job.inputs))


if __name__ == "__main__":
    run(quantize)
