import os
from zipfile import ZipFile

import pytest

from pt2mx import MXError
from pt2mx.pt2e.cli.checks import check_folder_name, check_program_name
from pt2mx.pt2e.cli.command import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")


@pytest.mark.parametrize("name", ["a.pt2", "A.PT2", "there/a.b.pt2", os.devnull])
def test_names_of_programs(name):
    check_program_name(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "a.onnx",
            r"its name must end in \.pt2; `pt2mx export-onnx` makes a \.onnx file of what `pt2mx quantize` wrote",
        ),
        ("a.safetensors", r"its name must end in \.pt2; `pt2mx save-checkpoint` makes"),
        ("a.pt", r"its name must end in \.pt2$"),
        ("a", r"its name must end in \.pt2$"),
        ("pt2", r"its name must end in \.pt2$"),
        ("there", "it must be a file"),
        ("nowhere/a.pt2", "a folder that exists"),
    ],
)
def test_names_that_are_none_of_a_program(name, message):
    with pytest.raises(MXError, match=message):
        check_program_name(name)


@pytest.mark.parametrize("name", ["new", "there", "llama-3.1", "a.b/"])
def test_names_of_folders(name):
    check_folder_name(name, "checkpoint")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.onnx", r"'a\.onnx' has the name of a file: a language model is written to a folder; `pt2mx export-onnx`"),
        ("a.safetensors", "has the name of a file: .*; `pt2mx save-checkpoint` makes"),
        ("a.GGUF", "has the name of a file: a language model is written to a folder$"),
        ("file", "is a file"),
        ("./there/../checkpoint", "is the folder of the checkpoint"),
    ],
)
def test_names_that_are_none_of_a_folder(name, message):
    with pytest.raises(MXError, match=message):
        check_folder_name(name, "checkpoint")


def test_outputs_of_a_package_are_torchs(capsys):
    with ZipFile("a.pt2", "w") as archive:
        archive.writestr("a/data/aotinductor/model", "")
    assert main(["run", "a.pt2", "--output", "a.npz"]) == 2
    assert "cannot write 'a.npz': its name must end in .pt or .pth" in capsys.readouterr().err
