"""The process that quantizes a model by one method: read the job, measure the method, write what it made.

A folder holds the job: `checkpoint/`, the calibration inputs, the held-out inputs, and `NAME.json` with the options.
The process writes `NAME.safetensors` and `NAME.cost`, the seconds and the peak memory. The first holds the dequantized
weights of the whole model. Methods that have activation quantizers of their own write the outputs for the held-out
inputs instead.
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

#: the files of the inputs, `inputs` (windows, ...)
CALIBRATION, HELD_OUT = "calibration.safetensors", "held_out.safetensors"
CHECKPOINT, PICKLED = "checkpoint", "model.pt"
#: the name of the outputs for a held-out window of that index
OUTPUT = "output {}"


class Job(NamedTuple):
    """A model to quantize.

    Args:
        model: the float model in evaluation mode, on the CPU.
        tokenizer: its tokenizer; None: a model of images.
        inputs: the calibration inputs, (windows, tokens) int64 or (windows, 3, height, width) float32.
        model_name: the name of the model.
        method: the name of the method.
        format: the formats of weights and activations, such as "W4" or "W4A8".
        iterations: the steps of methods that learn.
        device: where to quantize; a device other than the CPU makes the seconds wall time.
    """

    model: nn.Module
    tokenizer: Any
    inputs: Tensor
    model_name: str
    method: str
    format: str
    iterations: int
    device: str


def save_checkpoint(folder: Path, model: nn.Module, tokenizer: Any) -> None:
    """Write a model of transformers with its tokenizer, or any module where the tokenizer is None."""
    folder.mkdir()
    if tokenizer is None:
        torch.save(model, folder / PICKLED)
    else:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def load_checkpoint(folder: Path, auto: str) -> tuple[nn.Module, Any]:
    """Return what `save_checkpoint` wrote, on the CPU.

    Args:
        folder: the folder of the checkpoint.
        auto: the class of transformers that loads the model.
    """
    if (folder / PICKLED).exists():
        return torch.load(folder / PICKLED, weights_only=False), None
    model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def run(quantize: Callable[[Job], dict[str, Tensor] | nn.Module]) -> None:
    """Quantize the model of the job that the command line names.

    Args:
        quantize: returns the dequantized weights, or a module to call with held-out inputs on the job's device.
    """
    file = Path(sys.argv[1])
    options = json.loads(file.read_text())
    model, tokenizer = load_checkpoint(file.parent / CHECKPOINT, options.pop("auto"))
    job = Job(model, tokenizer, load_file(file.parent / CALIBRATION)["inputs"], **options)
    torch.manual_seed(0)
    clock = time.process_time if job.device == "cpu" else time.perf_counter
    begin = clock()
    result = quantize(job)
    cost = {"seconds": clock() - begin, "peak MB": peak()}
    if isinstance(result, nn.Module):
        held_out = load_file(file.parent / HELD_OUT)["inputs"].split(1)
        with torch.no_grad():
            result = {OUTPUT.format(i): result(window.to(job.device)) for i, window in enumerate(held_out)}
    saved = {name: tensor.detach().float().cpu().contiguous().clone() for name, tensor in result.items()}
    save_file(saved, file.with_suffix(".safetensors"))
    file.with_suffix(".cost").write_text(json.dumps(cost))
