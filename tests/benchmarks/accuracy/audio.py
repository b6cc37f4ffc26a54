"""Speech from packages, mono at 16 kHz: two speakers for calibration, English and Mandarin (`f5-tts`, 12 s), other
English ones for distillation (`moonshine-voice`, 87 s), and one more for test, Mandarin (`s3tokenizer`, 8 s).

Telephone speech (`pyannote.audio` ships some) is unsuitable for calibration: it has nothing above 4 kHz. For other
speech GPTQ then rounds worse than to nearest.
"""

import wave
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.benchmarks.accuracy.packages import folder

RATE = 16_000
#: speeds at which distillation plays the recordings
SPEEDS = tuple(1 + 0.025 * i for i in range(-12, 13))


def calibration(speed: float = 1.0) -> list[Tensor]:
    """Return recordings, (samples,) float32 within +-1."""
    examples = folder("f5_tts") / "infer" / "examples" / "basic"
    return [_read(examples / f"basic_ref_{language}.wav", speed) for language in ("en", "zh")]


def held_out() -> list[Tensor]:
    """Return recordings that calibration does not see."""
    return [_read(folder("s3tokenizer") / "assets" / f"BAC009S0764W012{i}.wav") for i in (1, 2)]


def lessons() -> list[Tensor]:
    """Return recordings for distillation, each at several speeds."""
    names = ("beckett", "clone-test", "endgame_nagg_nell", "two_cities")
    paths = [folder("moonshine_voice") / "assets" / f"{name}.wav" for name in names]
    return [recording for speed in SPEEDS for recording in (*calibration(speed), *(_read(p, speed) for p in paths))]


def _read(path: Path, speed: float = 1.0) -> Tensor:
    with wave.open(str(path)) as file:
        rate, samples = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), np.int16)
    return resampled(torch.from_numpy(samples / 2**15), rate, speed)


def resampled(samples: Tensor, rate: int, speed: float = 1.0) -> Tensor:
    """Return a recording at another rate, (samples,) float, at 16 kHz in float32."""
    size = int(len(samples) * RATE / (rate * speed))
    spectrum = torch.fft.rfft(samples)[: size // 2 + 1]
    return (torch.fft.irfft(spectrum, size) * (size / len(samples))).float()
