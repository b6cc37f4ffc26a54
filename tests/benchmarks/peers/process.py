"""The process that quantizes a model by one method: read the job, measure the method, write what it made.

A folder holds the job: `checkpoint/`, the inputs for calibration, validation and the test, and `NAME.json` with the
options. The process writes `NAME.safetensors` and `NAME.cost`, the seconds, the peak memory, and whether linear layers
rotate their inputs. The first holds the dequantized weights of the whole model, and the rotations that linear layers
apply to their inputs. Methods that have activation quantizers of their own write the outputs for the inputs of
validation and test instead, in one format or in several.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.benchmarks.peak import peak

#: modules that stay in float; names of their ends
IN_FLOAT = ("lm_head", "pooler.dense")
#: the names of the inputs that methods see, and of those that they are evaluated on
CALIBRATION, EVALUATED = "calibration", ("validation", "test")
CHECKPOINT, PICKLED = "checkpoint", "model.pt"
#: the name of the outputs for a format and a window of that name and index
OUTPUT = "output {} {} {}"
#: the name of the matrix, (inputs, inputs), by which a linear layer multiplies its inputs
ROTATION = "{}.rotation"


class Job(NamedTuple):
    """A model to quantize.

    Args:
        model: the float model in evaluation mode, on the CPU.
        tokenizer: its tokenizer; None: a model of images.
        inputs: the calibration inputs, (windows, tokens) int64 or (windows, 3, height, width) float32.
        model_name: the name of the model.
        format: the formats of weights and activations, such as "W4" or "W4A8".
        setting: the name of the setting of the method.
        options: the options of the setting.
        seed: seed for methods that draw numbers.
        device: where to quantize; a device other than the CPU makes the seconds wall time.
    """

    model: nn.Module
    tokenizer: Any
    inputs: Tensor
    model_name: str
    format: str
    setting: str
    options: Any
    seed: int
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


def inputs_file(folder: Path, name: str) -> Path:
    """Return the file of inputs in the folder of a job, `inputs` (windows, ...)."""
    return folder / f"{name}.safetensors"


@torch.no_grad()
def rotation_matrix(linear: nn.Linear, rotate: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the matrix of a rotation of the inputs of a linear layer, (inputs, inputs)."""
    return rotate(torch.eye(linear.in_features, device=linear.weight.device))


def _rotates(result: Mapping[str, Tensor | nn.Module]) -> bool:
    """Return whether linear layers rotate their inputs, which this project's graphs do by an operator `hadamard`."""
    modules = [module for made in result.values() if isinstance(made, nn.Module) for module in made.modules()]
    if any("hadamard" in str(module.graph) for module in modules if isinstance(module, GraphModule)):
        return True
    return any(name.endswith(ROTATION.format("")) for name in result)


def run(quantize: Callable[[Job], Mapping[str, Tensor] | Mapping[str, nn.Module] | nn.Module]) -> None:
    """Quantize the model of the job that the command line names.

    Args:
        quantize: returns the dequantized weights, or a module to call with inputs on the job's device, or a module for
            each of several formats.
    """
    file = Path(sys.argv[1])
    options = json.loads(file.read_text())
    model, tokenizer = load_checkpoint(file.parent / CHECKPOINT, options.pop("auto"))
    job = Job(model, tokenizer, load_file(inputs_file(file.parent, CALIBRATION))["inputs"], **options)
    torch.manual_seed(job.seed)
    clock = time.process_time if job.device == "cpu" else time.perf_counter
    begin = clock()
    result = quantize(job)
    if isinstance(result, nn.Module):
        result = {job.format: result}
    cost = {"seconds": clock() - begin, "peak MB": peak(), "rotates": _rotates(result)}
    windows = {name: load_file(inputs_file(file.parent, name))["inputs"].split(1) for name in EVALUATED}
    tensors: dict[str, Tensor] = {}
    for key, made in result.items():
        tensors |= {key: made} if isinstance(made, Tensor) else _outputs(key, made, windows, job.device)
    saved = {name: tensor.detach().float().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(saved, file.with_suffix(".safetensors"))
    file.with_suffix(".cost").write_text(json.dumps(cost))


@torch.no_grad()
def _outputs(name: str, module: nn.Module, windows: Mapping[str, Sequence[Tensor]], device: str) -> dict[str, Tensor]:
    """Return the outputs of the module of a format for the windows of each part."""
    return {
        OUTPUT.format(name, part, i): module(window.to(device))
        for part, kept in windows.items()
        for i, window in enumerate(kept)
    }
