import re
import time
import warnings
from pathlib import Path

import pytest
import torch

from pt2mx.extras import import_extra
from pt2mx.pt2e.cli import progress
from pt2mx.pt2e.cli.progress import Progress, note, warnings_as_notes

transformers = import_extra("transformers", "hf")


def test_each_stage_has_a_line_when_it_begins(stage_lines, capsys):
    with Progress(3) as stages:
        assert re.fullmatch(r"\[ *\d+\.\d s\] 1/3 load\n", capsys.readouterr().err)
        stages.begin("work")
        note("said")
        stages.begin("work")
    out, err = capsys.readouterr()
    assert out == "" and [line.split("] ")[-1] for line in err.splitlines()] == ["2/3 work", "pt2mx: said", "3/3 work"]
    assert list(stages.times()) == ["load", "work"]
    assert stages.times() == stages.times(), "the last stage has ended"
    assert re.fullmatch(r"load 0\.0 s, work 0\.0 s", stages.seconds())


def test_stages_without_a_first_one(stage_lines, capsys):
    stages = Progress(1, first=None)
    assert capsys.readouterr().err == ""
    stages.begin("look")
    assert capsys.readouterr().err.endswith("1/1 look\n")


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (progress.__file__, "pt2mx"),
        (str(Path(progress.__file__).parents[2] / "fx" / "lower.py"), "pt2mx"),
        (torch.__file__, "torch"),
        (transformers.modeling_utils.__file__, "transformers"),
        ("/lib/site-packages/one_module.py", "one_module"),
        ("file.py", "file.py"),
    ],
)
def test_warnings_look_as_notes_of_the_package_that_warns(file, owner):
    def text():
        return warnings.formatwarning(UserWarning("of two\n  lines"), UserWarning, file, 3, "")

    before = text()
    with warnings_as_notes():
        assert text() == f"{owner}: warning: of two lines\n"
    assert text() == before and before.startswith(f"{file}:3: UserWarning: of two\n  lines\n")


@pytest.mark.compiled
def test_a_long_stage_prints_a_line_now_and_then(stage_lines, capsys):
    with progress.heartbeat(0.4):
        progress.stage_line("export")
        time.sleep(1.6)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("] export") and 1 <= len(lines[1:]) <= 4
    assert all(line.endswith("] ...") for line in lines[1:])
    time.sleep(0.6)
    assert not capsys.readouterr().err
