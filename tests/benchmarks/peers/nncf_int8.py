"""NNCF: static INT8 of activations and weights, with its fast correction of biases, the only one for torch."""

import os

import nncf
from torch import nn

from tests.benchmarks.peers.process import Job, run


def quantize(job: Job) -> nn.Module:
    os.environ["NNCF_EXTENSION_LOAD_TIMEOUT"] = "0"  # a busy processor compiles its kernels for more than a minute
    data = nncf.Dataset(list(job.inputs.split(1)))
    return nncf.quantize(job.model, data, subset_size=len(job.inputs))


if __name__ == "__main__":
    run(quantize)
