from pathlib import Path

import numpy as np
import pytest
import torch

from pt2mx import MXError
from pt2mx.pt2e.cli.calibration import groups, load_batches


def names_of(files):
    """Stands for what makes batches."""
    return {"all": [file.name for file in files]}


def touch(folder, *names):
    for name in names:
        (folder / name).touch()


def test_batches_in_the_order_of_their_names(tmp_path):
    torch.save(torch.ones(1), tmp_path / "b.pt")
    torch.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    np.savez(tmp_path / "c.npz", x=np.ones(3, np.float32))
    (tmp_path / "notes.txt").write_text("left alone")
    found = load_batches(tmp_path, {})
    assert [Path(source).name for source in found] == ["a.pt", "b.pt", "c.npz"]
    assert [batch["x"].shape[0] if isinstance(batch, dict) else batch.item() for batch in found.values()] == [2, 1, 3]


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
