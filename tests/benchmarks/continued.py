"""SmolLM2-135M-Instruct trained further, so that its weights leave the levels of the package's 4-bit codes.

    python -m tests.benchmarks.continued [--steps 400] [--rate 2e-3] [--layers 1] [--device cuda]
        [--folder build/continued] [--seed 0]

All parameters are trained in float32, with matmuls in bfloat16, on docstrings of packages that calibration and
evaluation do not read. The checkpoint in the folder is bfloat16. The same packages, device and seed give the same one.

The table compares the bfloat16 weights of the decoder's linear layers with the 16 levels of their block in the package,
in bfloat16. `on levels` is the share of weights that equal a level. `halfway` is the share that equal a value halfway
between two levels: where training has moved all weights far enough, chance puts as many on levels, 1.7%. `distance` is
the mean distance from the nearest level, in units of the distance between two levels: 0.25 where no trace of them is
left. The perplexity is of other files of these packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pt2mx.extras import import_extra
from pt2mx.pt2e.language.texts import perplexity
from tests.benchmarks.accuracy import smollm2, texts
from tests.benchmarks.measure import Row, hardware, print_table, timed

FOLDER = Path(__file__).parents[2] / "build" / "continued"
#: packages to train on, of which those that are installed are read
PACKAGES = tuple(name for name in texts.LESSONS if name not in texts.SEEN + texts.HELD_OUT)
PACKAGES += ("matplotlib", "pandas", "statsmodels", "xarray", "skimage", "jax")
#: the windows of a step, their tokens, and the windows for the perplexity
WINDOWS, LENGTH, HELD_OUT = 32, 256, 32
#: the highest rate, and the steps until it is reached
RATE, WARM_UP = 2e-3, 20
#: values of a block in the package, and its levels
BLOCK, LEVELS = 32, 16


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, metavar="N")
    parser.add_argument("--rate", type=float, default=RATE, metavar="R")
    parser.add_argument("--layers", type=int, metavar="N", help="keep the first N layers")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    decoder, tokenizer = smollm2.load()
    if options.layers:
        del decoder.model.layers[options.layers :]
        decoder.config.num_hidden_layers = options.layers
    decoder.to(options.device)
    print(f"trained on docstrings of {', '.join(installed())}", file=sys.stderr)
    lessons, held_out = (
        lessons_of(tokenizer, count, backward).to(options.device)
        for count, backward in ((options.steps * WINDOWS, False), (HELD_OUT, True))
    )
    levels = {name: Levels.of(weight) for name, weight in linear_weights(decoder).items()}
    before = {"": "before", **figures(decoder, held_out, levels)}
    shuffled = lessons[torch.randperm(len(lessons))]
    seconds = timed(lambda: train(decoder, shuffled.split(WINDOWS), options.rate))
    rows: list[Row] = [before, {"": "after", **figures(decoder, held_out, levels)}]
    decoder.to(torch.bfloat16).save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    print_table(rows, list(before))
    print(f"{options.steps} steps of {WINDOWS * LENGTH} tokens in {seconds:.0f} s; {hardware()}")


def installed() -> list[str]:
    """Return the packages to train on that are installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name)]


def lessons_of(tokenizer: Any, count: int, backward: bool = False, read: texts.Read = texts.long_docstrings) -> Tensor:
    """Return windows of their docstrings, (count, LENGTH) int64, from the first file or from the last on.

    Another `read` than docstrings takes other texts of the files.
    """
    return texts.package_blocks(tokenizer, installed(), count, LENGTH, backward, read)


def load() -> tuple[nn.Module, Any]:
    """Return the trained decoder in float32 and its tokenizer.

    Raises:
        FileNotFoundError: where the folder of the command has no checkpoint.
    """
    if not (FOLDER / "config.json").is_file():
        raise FileNotFoundError(f"{str(FOLDER)!r} has no checkpoint: python -m tests.benchmarks.continued")
    transformers = import_extra("transformers", "hf")
    decoder = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return decoder.eval(), transformers.AutoTokenizer.from_pretrained(FOLDER)


def train(decoder: nn.Module, batches: Sequence[Tensor], rate: float) -> None:
    """Train all parameters by a step a batch of tokens, (windows, length) each, and round them to bfloat16."""
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0)
    up_and_down = partial(_share_of_rate, steps=len(batches))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, up_and_down)
    for batch in tqdm(batches, desc="training", unit=" steps", disable=None):
        with torch.autocast(batch.device.type, torch.bfloat16):
            loss = decoder(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(parameter.bfloat16())


def _share_of_rate(step: int, steps: int) -> float:
    return min((step + 1) / WARM_UP, 1 - step / steps)


@torch.no_grad()
def figures(decoder: nn.Module, held_out: Tensor, levels: Mapping[str, Levels]) -> Row:
    """Return the perplexity of a decoder on tokens, (windows, length), and where its weights lie between levels."""
    weights = linear_weights(decoder)
    on, halfway, distance = sum(levels[name].places(weight) for name, weight in weights.items()).tolist()
    values = sum(weight.numel() for weight in weights.values())
    return {
        "perplexity": f"{perplexity(smollm2.Logits(decoder), held_out.split(1)).perplexity:.2f}",
        "on levels": f"{on / values:.2%}",
        "halfway": f"{halfway / values:.2%}",
        "distance": f"{distance / values:.3f}",
    }


def linear_weights(decoder: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the linear layers, without the head, (outputs, inputs) each."""
    modules = decoder.model.layers.named_modules()
    return {name: module.weight for name, module in modules if isinstance(module, nn.Linear)}


class Levels(NamedTuple):
    """The levels of each block of a weight: low + i * step, (rows, blocks, 1) each."""

    low: Tensor
    step: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Levels:
        """Return the levels of a weight from the package, (rows, columns): Q4_1 uses the first and the last of 16."""
        low, high = weight.detach().unflatten(1, (-1, BLOCK)).aminmax(dim=2, keepdim=True)
        return cls(low, (high - low) / (LEVELS - 1))

    def places(self, weight: Tensor) -> Tensor:
        """Return the number of bfloat16 values that are a level, or halfway between two, and the sum of distances."""
        values = weight.bfloat16().unflatten(1, (-1, BLOCK))
        places = (values - self.low) / self.step
        nearest = places.round()
        on, halfway = (
            (values == (self.low + place * self.step).bfloat16()).sum() for place in (nearest, places.floor() + 0.5)
        )
        return torch.stack([on, halfway, (places - nearest).abs().double().sum()])


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matmuls of CUDA ask for
    torch.use_deterministic_algorithms(True, warn_only=True)
    main()
