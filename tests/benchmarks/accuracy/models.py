"""The table of models, and the measuring of one of them by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tqdm import tqdm

from tests.benchmarks.accuracy import crepe, digits, efficientnet, minilm, smollm2, speaker
from tests.benchmarks.accuracy.case import Case
from tests.benchmarks.measure import Row

MODELS: dict[str, Callable[[], Case]] = {
    "minilm": minilm.case,
    "smollm2": smollm2.case,
    "crepe-tiny": partial(crepe.case, "tiny"),
    "crepe-full": partial(crepe.case, "full"),
    "efficientnet-lite0": efficientnet.case,
    "speaker": speaker.case,
    "digits-cnn": partial(digits.case, "cnn"),
    "digits-mlp": partial(digits.case, "mlp"),
}


def rows(name: str, presets: Sequence[str], formats: Sequence[str] | None = None) -> list[Row]:
    return list(tqdm(MODELS[name]().rows(presets, formats), desc=name, unit=" rows", disable=None))
