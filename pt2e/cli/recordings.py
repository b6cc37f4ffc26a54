"""Files of recordings."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from pt2mx.errors import MXError
from pt2mx.pt2e.user_errors import one_line

#: bytes of a sample of a recording -> its dtype, its value of silence, its largest magnitude
_PCM = {1: ("u1", 128, 2**7), 2: ("<i2", 0, 2**15), 4: ("<i4", 0, 2**31)}


def read_recording(file: Path, rate: int) -> np.ndarray:
    """Return the samples of a .wav file: (time,) float32 in [-1, 1), the mean of its channels.

    Args:
        file: of 8, 16 or 32 bits PCM.
        rate: the samples a second that it must have.

    Raises:
        MXError: for a file that holds no such recording.
    """
    try:
        with wave.open(str(file)) as recording:
            width, channels, found = recording.getsampwidth(), recording.getnchannels(), recording.getframerate()
            count = recording.getnframes()
            frames = recording.readframes(count)
    except (wave.Error, EOFError, OSError) as error:
        raise MXError(f"{str(file)!r} is no .wav file of PCM samples: {one_line(error)}") from None
    if width not in _PCM:
        raise MXError(f"{str(file)!r} has {8 * width} bits a sample: convert it to 16 (8, 16 and 32 are read)")
    if found != rate:
        raise MXError(
            f"{str(file)!r} has {found} samples a second, the model takes {rate}: convert it, as by "
            f"`ffmpeg -i {file.name} -ar {rate} converted.wav`"
        )
    if len(frames) != count * width * channels:
        raise MXError(f"{str(file)!r} ends after {len(frames)} of {count * width * channels} bytes: copy it again")
    dtype, silence, largest = _PCM[width]
    samples = (np.frombuffer(frames, dtype).astype(np.float32) - silence) / largest
    if not samples.size:
        raise MXError(f"{str(file)!r} holds no samples: remove it")
    return samples.reshape(-1, channels).mean(1)
