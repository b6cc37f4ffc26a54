"""AutoRound: signed gradient descent on the rounding and the range of each block, alone or after rotations."""

import torch
from auto_round import AutoRound
from auto_round.algorithms.transforms.hadamard.transforms import build_hadamard_transform
from torch import Tensor, nn

from tests.benchmarks.peers.process import IN_FLOAT, ROTATION, Job, rotation_matrix, run


def quantize(job: Job) -> dict[str, Tensor]:
    data = torch.utils.data.DataLoader([{"input_ids": row} for row in job.inputs], batch_size=8)
    windows, length = job.inputs.shape[:2]
    sizes = {"nsamples": windows, "seqlen": length, "batch_size": 8, "seed": job.seed}
    # it rotates the inputs where it quantizes them; with activations in float it would tune rotated weights on others
    scheme = {} if job.format == "W4A4" or "rotation_config" in job.options else {"act_bits": 16}
    rounder = AutoRound(
        job.model, job.tokenizer, scheme="MXFP4", dataset=data, device_map=job.device, **sizes, **scheme, **job.options
    )
    model = rounder.quantize()[0]
    weights = {name.replace(".orig_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    if "rotation_config" in job.options:
        rotate = build_hadamard_transform(**model._rotation_config.model_dump(), location="input", inverse=True)
        for name, module in model.named_modules():
            linear = getattr(module, "orig_layer", module)  # a layer with quantized inputs is wrapped
            if f"{name}.weight" in weights and isinstance(linear, nn.Linear) and not name.endswith(IN_FLOAT):
                weights[ROTATION.format(name)] = rotation_matrix(linear, rotate)
    return weights


if __name__ == "__main__":
    run(quantize)
