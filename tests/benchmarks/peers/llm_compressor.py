"""llm-compressor: GPTQ, alone and after SmoothQuant or the rotations of SpinQuant that weights absorb.

It chooses the device itself: a GPU where torch sees one.
"""

from __future__ import annotations

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier
from torch import Tensor

from tests.benchmarks.peers.process import Job, run


def quantize(job: Job) -> dict[str, Tensor]:
    rows = job.inputs.tolist()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    before = {
        "SmoothQuant": [SmoothQuantModifier(smoothing_strength=0.5)],
        "SpinQuant": [SpinQuantModifier(transform_type="random-hadamard")],  # for widths that are no power of two
    }
    scheme = "MXFP4" if job.format == "W4A4" else "MXFP4A16"
    gptq = GPTQModifier(targets="Linear", ignore=["lm_head", "pooler.dense"], scheme=scheme)
    recipe = [*before.get(job.method.split()[0], []), gptq]
    sizes = {"num_calibration_samples": len(rows), "max_seq_length": len(rows[0])}
    names = set(job.model.state_dict())
    oneshot(model=job.model, processor=job.tokenizer, dataset=data, recipe=recipe, **sizes)
    return {name: tensor for name, tensor in job.model.state_dict().items() if name in names}


if __name__ == "__main__":
    run(quantize)
