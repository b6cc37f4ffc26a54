import wave

import numpy as np
import pytest
import torch

from pt2mx.extras import import_extra
from pt2mx.pt2e.cli import progress
from pt2mx.pt2e.cli.command import main


@pytest.fixture
def transformers():
    return import_extra("transformers", "hf")


@pytest.fixture
def run(place, monkeypatch, capsys):
    """Run a command in the folder `place` of a test's module; return exit status, stdout and stderr."""
    monkeypatch.chdir(place)

    def run(*arguments):
        capsys.readouterr()
        status = main(list(arguments))
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def checkpoint(tmp_path, transformers):
    """Save a model with random weights, and processors, to a folder."""

    def save(name: str, config: str, fields: dict, *processors, dtype="float32", **options) -> str:
        folder = tmp_path / "checkpoint"
        model = getattr(transformers, name)(getattr(transformers, config)(**fields))
        model.to(getattr(torch, dtype)).save_pretrained(folder, **options)
        for processor in processors:
            processor.save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture
def photos(tmp_path):
    """A folder of three images, red, green and blue; the last one is taller than wide."""
    image, folder = import_extra("PIL.Image", "vision"), tmp_path / "photos"
    folder.mkdir()
    for name, size, colour in (("a.png", (60, 40), "red"), ("b.JPG", (60, 40), "lime"), ("c.jpeg", (40, 60), "blue")):
        image.new("RGB", size, colour).save(folder / name)
    return folder


@pytest.fixture
def write_wav(tmp_path):
    """Write integers, (time, channels), to a .wav file."""

    def write(name: str, samples: np.ndarray, rate: int = 16000):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        with wave.open(str(file), "wb") as recording:
            recording.setnchannels(samples.shape[1])
            recording.setsampwidth(samples.dtype.itemsize)
            recording.setframerate(rate)
            recording.writeframes(samples.tobytes())
        return file

    return write


@pytest.fixture(autouse=True)
def no_stage_lines(request, monkeypatch):
    """Print no stages, so that tests can compare stderr; `stage_lines` prints them."""
    if "stage_lines" not in request.fixturenames:
        monkeypatch.setattr(progress, "stage_line", lambda name: None)


@pytest.fixture
def stage_lines():
    """Print the stages of commands."""
