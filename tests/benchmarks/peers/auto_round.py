"""AutoRound: signed gradient descent on the rounding and the range of each block, alone or after rotations."""

from __future__ import annotations

import torch
from auto_round import AutoRound
from torch import Tensor

from tests.benchmarks.peers.process import Job, run


def quantize(job: Job) -> dict[str, Tensor]:
    data = torch.utils.data.DataLoader([{"input_ids": row} for row in job.inputs], batch_size=8)
    windows, length = job.inputs.shape[:2]
    sizes = {"nsamples": windows, "seqlen": length, "batch_size": 8, "seed": job.seed}
    scheme = {} if job.format == "W4A4" else {"act_bits": 16}
    rounder = AutoRound(
        job.model, job.tokenizer, scheme="MXFP4", dataset=data, device_map=job.device, **sizes, **scheme, **job.options
    )
    weights = rounder.quantize()[0].state_dict()
    return {name.replace(".orig_layer.", "."): tensor for name, tensor in weights.items()}


if __name__ == "__main__":
    run(quantize)
