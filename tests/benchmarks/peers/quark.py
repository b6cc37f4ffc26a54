"""Quark: GPTQ, GPTAQ and Qronos, alone and after rotations."""

from dataclasses import replace

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithm.rotation.rotation_utils import InputRotationWrapper
from torch import Tensor
from torch.utils.data import DataLoader

from tests.benchmarks.peers.process import IN_FLOAT, ROTATION, Job, rotation_matrix, run


def quantize(job: Job) -> dict[str, Tensor]:
    template = LLMTemplate.get(job.model.config.model_type)
    config = template.get_config(
        "mxfp4" if job.format == "W4A4" else "mxfp4_weight_only",
        algorithm=list(job.options),
        algo_configs={name: replace(template.algo_config[name], **given) for name, given in job.options.items()},
        exclude_layers=[f"*{name}" for name in IN_FLOAT],
    )
    quantizer, names = ModelQuantizer(config), set(job.model.state_dict())
    data = DataLoader(job.inputs.to(job.device), batch_size=1)
    model = quantizer.freeze(quantizer.quantize_model(job.model.to(job.device), data))
    weights = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    for name, module in model.named_modules():
        if isinstance(module, InputRotationWrapper):
            weights[ROTATION.format(name)] = rotation_matrix(module.original_module, module.transform)
    return weights


if __name__ == "__main__":
    run(quantize)
