"""torchao: weights in MX formats, rounded to nearest."""

import torch
from torch import Tensor, nn
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from tests.benchmarks.peers.process import IN_FLOAT, Job, run


def quantize(job: Job) -> dict[str, Tensor]:
    weights, scale_mode = job.model.state_dict(), ScaleCalculationMode(job.options["scale_mode"])
    for name, module in job.model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d) and not name.endswith(IN_FLOAT):
            packed = MXTensor.to_mx(module.weight, torch.float4_e2m1fn_x2, 32, scale_mode)
            weights[f"{name}.weight"] = packed.dequantize(torch.float32)
    return weights


if __name__ == "__main__":
    run(quantize)
