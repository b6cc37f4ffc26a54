"""Resemblyzer's speaker encoder (GE2E, Wan et al., arXiv:1710.10467): an LSTM of three layers and a linear layer, every
operator quantized.

Calibrated on 12 s of speech, distilled on these and 87 s of others at 25 speeds, and tested on 8 s of another
speaker, see `audio.py`: windows of 1.6 s, each 0.1 s. Mean and worst cosine of the embeddings. The weights of LSTMs get
scales of least error before they are distilled.
"""

import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, relu

from tests.benchmarks.accuracy import audio
from tests.benchmarks.accuracy.case import Case, cosines, everything
from tests.benchmarks.accuracy.packages import folder
from tests.models import module_of

#: samples of a window of the spectrogram and between two, bands; frames that the encoder reads and between two of them
SIZE, HOP, BANDS = 400, 160, 40
FRAMES, STEP = 160, 10
AT_ONCE = 32
LOUDNESS = 10 ** (-30 / 20)


def speaker_encoder(self, spectrograms: Tensor) -> Tensor:
    """Mel spectrograms (batch, frames, 40) -> (batch, 256) of norm 1."""
    hidden = self.lstm(spectrograms)[0][:, -1]
    return normalize(relu(self.linear(hidden)))


def case() -> Case:
    model = module_of(speaker_encoder, lstm=nn.LSTM(BANDS, 256, 3, batch_first=True), linear=nn.Linear(256, 256))
    stored = torch.load(folder("resemblyzer") / "pretrained.pt", map_location="cpu", weights_only=True)
    model.load_state_dict({name: stored["model_state"][name] for name in model.state_dict()})
    seen = spectrograms(audio.calibration())
    shapes = ({0: torch.export.Dim("batch")},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export, on its own handling of an LSTM
        exported = torch.export.export(model.eval(), (seen[:2],), dynamic_shapes=shapes).module()
    judge = cosines(spectrograms(audio.held_out()), exported)

    def lessons(count: int) -> tuple[Tensor, ...]:
        windows = spectrograms(audio.lessons())
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
        return windows[order[:count]].split(AT_ONCE)

    batches = [(batch,) for batch in seen.split(AT_ONCE)]
    return Case(exported, batches, everything, judge, lessons=lessons, examples=24_000, rate=8e-4)


def spectrograms(recordings: list[Tensor]) -> Tensor:
    """(windows, 160, 40): the energy in each band of Slaney's mel scale, of speech of at least -30 dB."""
    bands, hann, found = mel_bands(), torch.hann_window(SIZE), []
    for samples in recordings:
        samples = samples * (LOUDNESS / samples.square().mean().sqrt()).clamp(min=1)
        spectrum = torch.stft(samples, SIZE, HOP, window=hann, return_complex=True, pad_mode="constant")
        energy = bands @ spectrum.abs().square()  # (40, frames)
        found.append(energy.unfold(1, FRAMES, STEP).permute(1, 2, 0))
    return torch.cat(found).contiguous()


def mel_bands() -> Tensor:
    """(40, 201): triangles over the frequencies of a spectrum, of equal area. The scale is linear to 1 kHz, at mel 15,
    and logarithmic from there, 27 mels to a factor of 6.4."""
    top = 15 + 27 * torch.tensor(audio.RATE / 2 / 1000).log() / torch.tensor(6.4).log()
    mels = torch.linspace(0, float(top), BANDS + 2)
    edges = torch.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))  # hertz
    frequencies = torch.linspace(0, audio.RATE / 2, SIZE // 2 + 1)
    low, middle, high = (edges[i : BANDS + i, None] for i in range(3))
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return torch.minimum(rising, falling).clamp(min=0) * 2 / (high - low)
