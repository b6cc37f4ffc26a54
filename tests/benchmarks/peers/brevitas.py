"""Brevitas: GPTQ, Qronos and learned rounding, alone and after rotations, by its program for language models.

The options are those of the program's YAML files. It chooses the device itself: a GPU where torch sees one.
"""

import torch
from brevitas.graph.equalize import RotatedModule
from brevitas.nn import QuantLinear
from brevitas_examples.llm import main as program
from brevitas_examples.llm.llm_quant import gpxq
from torch import Tensor

from tests.benchmarks.peers.process import ROTATION, Job, rotation_matrix, run

#: MXFP4 as in its papers
FORMAT = {
    "bit_width": 4,
    "group_size": 32,
    "quant_format": "float_ocp_e2m1",
    "quant_granularity": "per_group",
    "quant_type": "sym",
    "scale_precision": "po2_scale",
}
WEIGHTS = {f"weight_{name}": value for name, value in FORMAT.items()}
INPUTS = {
    f"input_{name}": value for name, value in {**FORMAT, "param_method": "stats", "scale_type": "dynamic"}.items()
}


@torch.no_grad()
def quantize(job: Job) -> dict[str, Tensor]:
    rows = [{"input_ids": row[None].numpy()} for row in job.inputs]
    program.get_dataset_for_model = lambda **_: rows
    if not torch.cuda.is_available():
        gpxq.send_to_device = lambda inputs, device: inputs  # it sends the inputs of a block to a GPU
    parser = program.create_args_parser()
    inputs = INPUTS if job.format == "W4A4" else {}
    model = {"model": job.model.name_or_path, "dtype": "float32", "seed": job.seed}
    parser.set_defaults(**model, **WEIGHTS, **inputs, scale_rounding_func_type="floor", **job.options)
    with torch.enable_grad():
        _, quantized = program.quantize_llm(parser.parse_args([]))
    names = set(job.model.state_dict())
    weights = {name.replace(".layer.", "."): tensor for name, tensor in quantized.state_dict().items()}
    weights = {name: tensor for name, tensor in weights.items() if name in names}
    for name, module in quantized.named_modules():
        if isinstance(module, QuantLinear):
            weights[f"{name.removesuffix('.layer')}.weight"] = module.quant_weight().value
        if isinstance(module, RotatedModule):
            weights[ROTATION.format(name)] = rotation_matrix(module.layer, module.rotation_forward)
    return weights


if __name__ == "__main__":
    run(quantize)
