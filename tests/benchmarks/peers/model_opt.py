"""NVIDIA ModelOpt: simulated quantization, calibrated by a pass over the data."""

import modelopt.torch.quantization as mtq
from torch import Tensor, nn

from tests.benchmarks.peers.process import Job, run


def quantize(job: Job) -> dict[str, Tensor]:
    def read(quantized: nn.Module) -> None:
        for row in job.inputs:
            quantized(input_ids=row[None].to(job.device))

    names = set(job.model.state_dict())
    mtq.quantize(job.model.to(job.device), mtq.MXFP4_DEFAULT_CFG, read)
    mtq.fold_weight(job.model)
    return {name: tensor for name, tensor in job.model.state_dict().items() if name in names}


if __name__ == "__main__":
    run(quantize)
