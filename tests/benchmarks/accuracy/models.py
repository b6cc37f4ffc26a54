"""The table of models, and the measuring of one of them by its name."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from tests.benchmarks.accuracy import crepe, digits, efficientnet, minilm, smollm2, speaker, whisper
from tests.benchmarks.accuracy.case import Case
from tests.benchmarks.measure import Row

MODELS: dict[str, Callable[[], Case]] = {
    "minilm": minilm.case,
    "smollm2": smollm2.case,
    "crepe-tiny": partial(crepe.case, "tiny"),
    "crepe-full": partial(crepe.case, "full"),
    **{f"efficientnet-lite{i}": partial(efficientnet.case, i) for i in range(len(efficientnet.SIZES))},
    "speaker": speaker.case,
    "digits-cnn": partial(digits.case, "cnn"),
    "digits-mlp": partial(digits.case, "mlp"),
    "whisper-base": whisper.case,
}


def rows(
    name: str,
    presets: Sequence[str],
    formats: Sequence[str] | None = None,
    device: str = "cpu",
    held_out: int = smollm2.HELD_OUT,
    **changes: Any,
) -> list[Row]:
    """Measure a model on a device, SmolLM2 on a number of blocks; `changes` are fields of its case."""
    if device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32 holds the values of these formats
    made = smollm2.case(held_out) if name == "smollm2" else MODELS[name]()
    case = replace(made, **changes).to(device)
    return list(tqdm(case.rows(presets, formats), desc=name, unit=" rows", disable=None))
