"""llm-compressor: GPTQ, alone and after SmoothQuant or rotations, and AWQ.

It chooses the device itself: a GPU where torch sees one.
"""

import functools

from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.quip import QuIPModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier
from torch import Tensor, nn

from tests.benchmarks.peers.process import IN_FLOAT, ROTATION, Job, rotation_matrix, run

TRANSFORMS = {kind.__name__: kind for kind in (AWQModifier, QuIPModifier, SmoothQuantModifier, SpinQuantModifier)}
QUANTIZERS = {kind.__name__: kind for kind in (GPTQModifier, QuantizationModifier)}


def quantize(job: Job) -> dict[str, Tensor]:
    rows = job.inputs.tolist()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    scheme = "MXFP4" if job.format == "W4A4" else "MXFP4A16"
    target = {"targets": "Linear", "ignore": [*IN_FLOAT], "scheme": scheme}
    recipe = [
        TRANSFORMS[name](**given) if name in TRANSFORMS else QUANTIZERS[name](**target, **given)
        for name, given in job.options.items()
    ]
    sizes = {"num_calibration_samples": len(rows), "max_seq_length": len(rows[0])}
    names = set(job.model.state_dict())
    oneshot(model=job.model, processor=job.tokenizer, dataset=data, recipe=recipe, **sizes)
    weights = {name: tensor for name, tensor in job.model.state_dict().items() if name in names}
    for name, linear in job.model.named_modules():
        if isinstance(linear, nn.Linear) and hasattr(linear, "quantization_scheme"):
            arguments = linear.quantization_scheme.weights  # GPTQ alone leaves rounded weights
            weights[f"{name}.weight"] = forward_quantize(linear, linear.weight, "weight", arguments)
        if isinstance(linear, nn.Linear) and linear._forward_pre_hooks:
            weights[ROTATION.format(name)] = rotation_matrix(linear, functools.partial(_rotate, linear))
    return weights


def _rotate(linear: nn.Linear, inputs: Tensor) -> Tensor:
    for hook in linear._forward_pre_hooks.values():
        inputs = hook(linear, (inputs,))
    return inputs


if __name__ == "__main__":
    run(quantize)
