from pathlib import Path

import numpy as np
import pytest
import torch

from pt2mx import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.calibration_files import groups, load_batches, read_audio, read_image


def names_of(files):
    """A reader that returns the names of its files."""
    return {"all": [file.name for file in files]}


def touch(folder, *names):
    for name in names:
        (folder / name).touch()


def test_batches_in_the_order_of_their_names(tmp_path):
    torch.save(torch.ones(1), tmp_path / "b.pt")
    torch.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    np.savez(tmp_path / "c.npz", x=np.ones(3, np.float32))
    (tmp_path / "notes.txt").write_text("left alone")
    result = load_batches(tmp_path, {})
    assert [Path(source).name for source in result] == ["a.pt", "b.pt", "c.npz"]
    assert [batch["x"].shape[0] if isinstance(batch, dict) else batch.item() for batch in result.values()] == [2, 1, 3]


@pytest.mark.parametrize(
    ("kind", "files"), [("images", ["a.png", "b.JPG", "c.jpeg"]), ("recordings", ["a.wav", "b.WAV"])]
)
def test_other_files_are_read_by_what_the_model_has_for_them(kind, files, tmp_path):
    touch(tmp_path, *files, ".DS_Store")
    assert load_batches(tmp_path, {kind: names_of}) == {"all": files}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"must be a folder that holds \.pt or \.npz files, .* images \(\.png, \.jpg, \.jpeg\) or .* \(\.wav\)$"),
        (["a.gif", "b.mp3"], r"or recordings \(\.wav\), this one holds 'a\.gif', 'b\.mp3'$"),
        (["a.png", "b.gif"], r"holds images \(\.png, \.jpg, \.jpeg\) and other files: 'b\.gif': move them elsewhere"),
        (["a.png", *(f"{i}.gif" for i in range(9))], r"'0\.gif', .*, '4\.gif' and 4 more"),
        (["a.png", "b.pt"], "holds batches and images: give a folder of one kind"),
        (["a.wav"], "holds recordings, which cannot be made inputs of this model: give a folder of images, or of batc"),
    ],
)
def test_bad_folders(files, message, tmp_path):
    touch(tmp_path, *files)
    with pytest.raises(MXError, match=message):
        load_batches(tmp_path, {"images": names_of})


def test_no_folder_and_a_model_of_batches_alone(tmp_path):
    with pytest.raises(MXError, match=r"no calibration batches: .* must be a folder"):
        load_batches(tmp_path / "none", {})
    touch(tmp_path, "a.png")
    with pytest.raises(MXError, match=r"cannot be made inputs of this model: give a folder of batches$"):
        load_batches(tmp_path, {})


def test_groups_are_of_one_size():
    a, b, c = files = [Path(name) for name in "abc"]
    assert list(groups(files, 2)) == [[a, b], [c, a]]
    assert list(groups(files, 3)) == [files] and list(groups([a], 3)) == [[a, a, a]]


@pytest.mark.parametrize(
    ("mode", "colour", "asked", "expected"),
    [
        ("L", 7, "RGB", (7, 7, 7)),
        ("RGBA", (1, 2, 3, 255), "RGB", (1, 2, 3)),
        ("RGB", (9, 9, 9), "L", 9),
    ],
)
def test_channels(mode, colour, asked, expected, tmp_path):
    import_extra("PIL.Image", "vision").new(mode, (3, 2), colour).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png", asked)
    assert image.size == (3, 2) and image.getpixel((2, 1)) == expected


def test_a_photo_taken_upright_is_upright(tmp_path):
    photo = import_extra("PIL.Image", "vision").new("RGB", (8, 4))
    turned = photo.getexif()
    turned[0x0112] = 6  # the tag of orientation: a quarter turn
    photo.save(tmp_path / "a.jpg", exif=turned)
    assert read_image(tmp_path / "a.jpg").size == (4, 8)


def test_no_image(tmp_path):
    (tmp_path / "a.png").write_text("no")
    with pytest.raises(MXError, match=r"a\.png' is no image: UnidentifiedImageError"):
        read_image(tmp_path / "a.png")


def test_sixteen_bits_are_scaled(tmp_path):
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    import_extra("PIL.Image", "vision").fromarray(ramp).save(tmp_path / "ramp.png")
    assert np.abs(np.asarray(read_image(tmp_path / "ramp.png", "L")).reshape(-1) - np.arange(256.0)).max() <= 1


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (np.array([[0], [128], [192]], np.uint8), [-1, 0, 0.5]),
        (np.array([[-(2**15)], [0], [2**14]], np.int16), [-1, 0, 0.5]),
        (np.array([[-(2**31)], [0], [2**30]], np.int32), [-1, 0, 0.5]),
        (np.array([[2**14, 0], [-(2**15), 2**14]], np.int16), [0.25, -0.25]),  # the mean of two channels
    ],
)
def test_samples(samples, expected, write_wav):
    result = read_audio(write_wav("a.wav", samples), 16000)
    assert result.dtype == np.float32 and result.tolist() == expected


def test_another_rate_says_how_to_convert(write_wav):
    file = write_wav("a.wav", np.zeros((3, 1), np.int16), rate=44100)
    message = r"a\.wav' has 44100 samples a second, the model takes 16000: .* `ffmpeg -i a\.wav -ar 16000"
    with pytest.raises(MXError, match=message):
        read_audio(file, 16000)


def test_no_recordings(tmp_path, write_wav):
    (tmp_path / "a.wav").write_bytes(b"no")
    with pytest.raises(MXError, match=r"a\.wav' is no \.wav file of PCM samples: EOFError"):
        read_audio(tmp_path / "a.wav", 16000)
    (tmp_path / "a.wav").write_bytes(b"no sound at all, but text")
    with pytest.raises(MXError, match="Error: file does not start with RIFF id"):
        read_audio(tmp_path / "a.wav", 16000)
    with pytest.raises(MXError, match="holds no samples"):
        read_audio(write_wav("b.wav", np.zeros((0, 1), np.int16)), 16000)
    with pytest.raises(MXError, match="has 24 bits a sample: convert it to 16"):
        read_audio(write_wav("c.wav", np.zeros((2, 1), "V3")), 16000)


@pytest.mark.parametrize("missing", [1, 2, 100])
def test_a_recording_that_is_cut_off(missing, write_wav):
    path = write_wav("a.wav", np.zeros((200, 1), np.int16))
    path.write_bytes(path.read_bytes()[:-missing])
    with pytest.raises(MXError, match="ends after"):
        read_audio(path, 16000)
