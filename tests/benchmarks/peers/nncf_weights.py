"""NNCF: compressed weights."""

import nncf
from torch import Tensor

from tests.benchmarks.peers.process import Job, run


def quantize(job: Job) -> dict[str, Tensor]:
    rows = [row[None] if job.tokenizer is None else {"input_ids": row[None]} for row in job.inputs]
    in_float = nncf.IgnoredScope(patterns=[".*lm_head.*", ".*pooler.*"])
    options = {"dataset": nncf.Dataset(rows), "ignored_scope": in_float, **job.options}
    return nncf.compress_weights(job.model, mode=nncf.CompressWeightsMode.MXFP4, **options).state_dict()


if __name__ == "__main__":
    run(quantize)
