"""The process that quantizes a model by one method: read the job, measure the method, write what it made.

A folder holds the job: `checkpoint/`, the calibration tokens, and `NAME.json` with the options. The process writes
`NAME.safetensors`, the dequantized weights of the whole model, and `NAME.cost`: processor seconds and peak memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.benchmarks.peak import peak

#: the file of the calibration tokens, `input_ids` (windows, tokens) int64
CALIBRATION = "calibration.safetensors"
CHECKPOINT = "checkpoint"


class Job(NamedTuple):
    """A model to quantize.

    Args:
        model: the float model of transformers, in evaluation mode.
        tokenizer: its tokenizer.
        tokens: the calibration tokens, (windows, tokens) int64.
        model_name: the name of the model.
        method: the name of the method.
        format: "W4", or "W4A8" or "W4A4" where activations are quantized, too.
        iterations: the steps of methods that learn.
        output: the path of the result, without a suffix.
    """

    model: nn.Module
    tokenizer: Any
    tokens: Tensor
    model_name: str
    method: str
    format: str
    iterations: int
    output: Path


def run(quantize: Callable[[Job], dict[str, Tensor] | None]) -> None:
    """Quantize the model of the job that the command line names.

    Args:
        quantize: returns the weights; None where it has written the result itself.
    """
    file = Path(sys.argv[1])
    options = json.loads(file.read_text())
    checkpoint = file.parent / CHECKPOINT
    model = getattr(transformers, options.pop("auto")).from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokens = load_file(file.parent / CALIBRATION)["input_ids"]
    job = Job(model, tokenizer, tokens, output=file.with_suffix(""), **options)
    torch.manual_seed(0)
    begin = time.process_time()
    weights = quantize(job)
    cost = {"seconds": time.process_time() - begin, "peak MB": peak()}
    if weights is not None:
        saved = {name: tensor.detach().float().contiguous().clone() for name, tensor in weights.items()}
        save_file(saved, job.output.with_suffix(".safetensors"))
    job.output.with_suffix(".cost").write_text(json.dumps(cost))
