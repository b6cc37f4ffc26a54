from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pt2mx import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.inputs import conform, signature_from_factory
from pt2mx.pt2e.models.input_files import groups, load_batch, load_batches, read_audio, read_image


class Model(nn.Module):
    def forward(self, x, pair, times=2, *, mask=None):
        raise NotImplementedError


X, A, B, MASK = torch.zeros(3, 4), torch.zeros(3), torch.zeros(5, dtype=torch.int64), torch.zeros(3)


@pytest.fixture
def signature():
    dims = {"x": {0: torch.export.Dim("n")}, "pair": None, "times": None, "mask": {0: torch.export.Dim.AUTO}}
    return signature_from_factory(Model().forward, (X, {"a": A, "b": B}, 2), {"mask": MASK}, dims)


def notes(batch, signature):
    told = []
    args, kwargs = conform(batch, signature, "file.pt", told.append)
    return args, kwargs, told


@pytest.mark.parametrize(
    "batch",
    [
        (X, {"a": A, "b": B}, 2, MASK),
        [X, A, B, 2, MASK],
        (X, A, B, MASK),  # the constant of the example
        {"mask": MASK, "x": X, "times": 2, "pair": {"a": A, "b": B}},
        {"x": X, "pair": {"b": B, "a": A}, "mask": MASK},
        (X, {"b": B, "a": A}, MASK),
        {"mask": MASK, "x": X, "pair_b": B, "pair_a": A},
        {"mask": MASK, "x": X, "pair_b": B, "pair_a": A, "times": torch.tensor(2)},  # a number in an array
    ],
)
def test_batches_take_the_form_of_the_example(batch, signature):
    args, kwargs, told = notes(batch, signature)
    assert args[0] is X and args[1]["a"] is A and args[1]["b"] is B and args[2] == 2 and kwargs["mask"] is MASK
    assert told == [] and isinstance(args[2], int)


def test_nested_values_are_matched_by_their_keys():
    """All have one shape, so that only names tell them apart."""

    class Nested(nn.Module):
        def forward(self, d):
            raise NotImplementedError

    x, k, v = torch.zeros(2), torch.ones(2), torch.ones(2) * 2
    signature = signature_from_factory(Nested().forward, ({"x": x, "parts": [{"k": k, "v": v}, 3]},), {})
    for batch in ({"d": {"parts": [{"v": v, "k": k}, 3], "x": x}}, ({"parts": ({"v": v, "k": k}, 3), "x": x},)):
        ((argument,), _) = conform(batch, signature, "f", print)
        assert list(argument) == ["x", "parts"] and argument["x"] is x and argument["parts"][1] == 3
        assert argument["parts"][0]["k"] is k and argument["parts"][0]["v"] is v


def test_a_tensor_is_a_batch_of_one():
    signature = signature_from_factory(nn.Linear(4, 4).forward, (X,), {})
    assert conform(X, signature, "f", print)[0][0] is X


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (X, A, B),
            r"file.pt: a batch must hold the inputs \['x', 'pair_a', .*, 'mask'\], this one holds 3",
        ),
        ({"x": X}, r"this one holds \['x'\]"),
        ({"x": X, "pair_a": A, "times": 2, "mask": MASK}, "this one holds"),  # as many values as vary
        ({"x": X, "pair_a": A, "pair_b": B, "mask": MASK, "extra": A}, "this one holds"),
        ((X, A, B, 3, MASK), "file.pt: the input 'times' is the constant 2 of the export, and cannot be 3"),
        ((X, A, B, 2.0, MASK), "the input 'times' is the constant 2"),
        (
            (X[:, :3], A, B, MASK),
            r"file.pt: the input 'x' must be of shape \(0 to any, 4\) and .*, not \(3, 3\)",
        ),
        ((X, A[:2], B, MASK), r"the input 'pair_a' must be of shape \(3,\)"),
        ((X, A, B.int(), MASK), r"the input 'pair_b' must be .* torch.int64, not \(5,\) torch.int32"),
        ((X, A, 5, MASK), "the input 'pair_b' must be .* not 5"),
        (("text", A, B, MASK), "the input 'x' must be .* not 'text'"),
        (
            {"x": X, "pair": {"a": A}, "mask": MASK},
            r"file.pt: pair must be nested as in the example: a dict of \['a', 'b'\], not a dict of \['a'\]",
        ),
        ({"x": X, "pair": {"a": A, "b": B, "c": B}, "mask": MASK}, r"not a dict of \['a', 'b', 'c'\]"),
        ((X, [A, B], 2, MASK), "pair must be .* not a list of 2"),
        (((X,), A, B, MASK), "pair must be .* not Tensor"),
    ],
)
def test_what_does_not_fit_names_file_and_input(batch, message, signature):
    with pytest.raises(MXError, match=message):
        notes(batch, signature)


def test_float64_is_cast_with_a_note(signature):
    args, kwargs, told = notes((X.double() + 0.1, A, B, MASK.double()), signature)
    assert args[0].dtype == kwargs["mask"].dtype == torch.float32 and args[0][0, 0] == torch.tensor(0.1)
    assert told == ["file.pt: x is cast from float64 to float32", "file.pt: mask is cast from float64 to float32"]


def test_files_of_batches(tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    torch.save((torch.ones(2), 3), tmp_path / "b.pt")
    np.savez(tmp_path / "c.npz", x=np.ones(3, np.float32))
    np.savez(tmp_path / "d.npz", np.ones(4, np.int64), np.zeros(4, np.int64))
    np.savez(tmp_path / "e.npz", arr_y=np.ones(3), arr_x=np.zeros(3))  # names of inputs, not of numpy
    a, b, c, d, e = (load_batch(file) for file in sorted(tmp_path.iterdir()))
    assert a["x"].shape == (2,) and b[1] == 3 and c["x"].dtype == torch.float32
    assert isinstance(d, tuple) and [t.sum().item() for t in d] == [4, 0]
    assert {name: t.sum().item() for name, t in e.items()} == {"arr_y": 3, "arr_x": 0}


def test_files_that_hold_no_batch(tmp_path):
    for content, name in ((b"no", "x.pt"), (b"", "y.npz")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(MXError, match=f"{name} is no batch: "):
            load_batch(tmp_path / name)
    torch.save(slice(3), tmp_path / "object.pt")
    for name in ("x.pt", "object.pt"):
        with pytest.raises(MXError, match=f"{name} is no batch: it holds more than tensors, .*, or is damaged$"):
            load_batch(tmp_path / name)
    np.savez(tmp_path / "z.npz", np.array(["text"]))
    with pytest.raises(MXError, match=r"z\.npz is no batch: TypeError: can't convert np\.ndarray"):
        load_batch(tmp_path / "z.npz")


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
    (tmp_path / "notes.txt").write_text("not a batch")
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
    with pytest.raises(
        MXError, match=r"cannot be made inputs of this model: give a folder of batches; --image-size, .*"
    ):
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
    for file, reason in (
        ("a.png", "Pillow cannot read it; give a PNG or JPEG file"),
        ("missing.png", "No such file or directory"),
        ("", "Is a directory"),
    ):
        with pytest.raises(MXError) as raised:
            read_image(tmp_path / file)
        assert str(raised.value) == f"{str(tmp_path / file)!r} is no image: {reason}"


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
