import numpy as np
import pytest

from pt2mx import MXError
from pt2mx.pt2e.cli.recordings import read_recording


@pytest.mark.parametrize(
    ("samples", "want"),
    [
        (np.array([[0], [128], [192]], np.uint8), [-1, 0, 0.5]),
        (np.array([[-(2**15)], [0], [2**14]], np.int16), [-1, 0, 0.5]),
        (np.array([[-(2**31)], [0], [2**30]], np.int32), [-1, 0, 0.5]),
        (np.array([[2**14, 0], [-(2**15), 2**14]], np.int16), [0.25, -0.25]),  # the mean of two channels
    ],
)
def test_samples(samples, want, write_wav):
    found = read_recording(write_wav("a.wav", samples), 16000)
    assert found.dtype == np.float32 and found.tolist() == want


def test_another_rate_says_how_to_convert(write_wav):
    file = write_wav("a.wav", np.zeros((3, 1), np.int16), rate=44100)
    message = r"a\.wav' has 44100 samples a second, the model takes 16000: .* `ffmpeg -i a\.wav -ar 16000"
    with pytest.raises(MXError, match=message):
        read_recording(file, 16000)


def test_no_recordings(tmp_path, write_wav):
    (tmp_path / "a.wav").write_bytes(b"no")
    with pytest.raises(MXError, match=r"a\.wav' is no \.wav file of PCM samples: EOFError"):
        read_recording(tmp_path / "a.wav", 16000)
    (tmp_path / "a.wav").write_bytes(b"no sound at all, but text")
    with pytest.raises(MXError, match="Error: file does not start with RIFF id"):
        read_recording(tmp_path / "a.wav", 16000)
    with pytest.raises(MXError, match="holds no samples"):
        read_recording(write_wav("b.wav", np.zeros((0, 1), np.int16)), 16000)
    with pytest.raises(MXError, match="has 24 bits a sample: convert it to 16"):
        read_recording(write_wav("c.wav", np.zeros((2, 1), "V3")), 16000)


@pytest.mark.parametrize("missing", [1, 2, 100])
def test_a_recording_that_is_cut_off(missing, write_wav):
    path = write_wav("a.wav", np.zeros((200, 1), np.int16))
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.raises(MXError, match="ends after"):
        read_recording(path, 16000)
