import json

import pytest
import torch

import pt2mx
from pt2mx.pt2e.cli.command import main
from tests.factories import FACTORY


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FACTORY)
    return tmp_path


def test_table_and_json(capsys):
    assert main(["sensitivity", "net.py:make", "--method", "both", "--formats", "mxfp4,mxfp8"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["module", "candidate", "operands", "alone", "estimate"] and len(lines) == 1 + 6 + 2
    assert lines[1].split()[1] == "mxfp4_e2m1{32}(even,even)"  # the spec of the recipe with that name
    assert "measure" in err
    assert main(["sensitivity", "net.py:make", "--json", "--operands", "activations", "--metric", "kl"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["metric"] == "kl" and {row["operands"] for row in result["rows"]} == {"activations"}
    assert {row["module"] for row in result["rows"]} == {"0", "2", "3"}
    assert all(row["estimate"] > 0 and row["alone"] is None for row in result["rows"])


def test_a_recipe_of_so_many_bits(capsys, folder):
    options = ["sensitivity", "net.py:make", "--bits", "5.5", "--output", "mine.yaml", "--activation", "mxfp8"]
    assert main(options) == 0
    out, err = capsys.readouterr()
    assert "weights" in out and "mine.yaml: " in err and " x mxfp4_e2m1{32}(even,even)" in err
    quantizer = pt2mx.MXQuantizer.from_recipe("mine.yaml")
    configs = [config for _, config in quantizer.to_dict()["module_name"]]
    assert {config["activation"] for config in configs} == {"mxfp8_e4m3{32}"}
    assert len({config["weight"] for config in configs}) == 2
    assert main(["compare", "net.py:make", "--recipes", "mine.yaml", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["name"] == "mine.yaml" and rows[0]["bits"] < 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--formats", "mxfp5"], "unknown MX element format 'mxfp5'"),
        (["--bits", "5"], "--bits and --output go together"),
        (["--bits", "3", "--output", "r.yaml"], "--bits 3 must be a number of at least 4.25, the least of --formats"),
        (["--bits", "nan", "--output", "r.yaml"], "--bits nan must be a number of at least 4.25"),
        (["--bits", "inf", "--output", "r.yaml"], "--bits inf must be a number of at least 4.25"),
        (
            ["--bits", "5", "--output", "r.yaml", "--formats", "mxfp8,mxfp6"],
            "--bits 5 must be a number of at least 6.25",
        ),
        (["--bits", "5", "--output", "net.py"], "the model and --output are one file, 'net.py'"),
        (["--bits", "5", "--output", "./net.py"], "the model and --output are one file, './net.py'"),
        (["--bits", "5", "--output", "r.json"], "cannot write 'r.json': its name must end in .yaml or .yml"),
        (["--bits", "5", "--output", "nowhere/r.yaml"], "cannot write 'nowhere/r.yaml'"),
        (["--bits", "5", "--output", "r.yaml", "--operands", "activations"], "--bits chooses formats of weights"),
        (["--activation", "mxfp8"], "--activation is of the recipe"),
        (["--left"], "--left is measured: give --method forward or both"),
        (["--calibration", "none"], "--calibration none leaves no batch to evaluate on"),
    ],
)
def test_errors(arguments, text, capsys, folder):
    assert main(["sensitivity", "net.py:make", *arguments]) == 2
    out, err = capsys.readouterr()
    assert text in err and err.count("\n") == 1 and not out
    assert {file.name for file in folder.iterdir()} == {"net.py"}


def test_calibration_is_not_written_over(capsys, folder):
    (folder / "batches").mkdir()
    torch.save(torch.ones(8, 64), folder / "batches" / "0.pt")
    options = ["--calibration", "batches", "--bits", "5", "--output", "batches/0.pt"]
    assert main(["sensitivity", "net.py:make", *options]) == 2
    assert "the calibration batch '0.pt' and --output are one file" in capsys.readouterr().err
    assert torch.equal(torch.load(folder / "batches" / "0.pt"), torch.ones(8, 64))


def test_a_checkpoint_is_not_written_over(capsys, folder):
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text("{}")
    for command in (["sensitivity", "hf:bert", "--bits", "5"], ["quantize", "--model", "hf:bert", "--recipe", "mxfp8"]):
        name = "bert/config.json" if command[0] == "sensitivity" else "bert/model.pt2"
        (folder / name).write_text("{}")
        assert main([*command, "--output", name]) == 2
        assert f"the checkpoint's file '{name[5:]}' and --output are one file" in capsys.readouterr().err
        assert (folder / name).read_text() == "{}"


def test_names_with_blanks_are_those_of_recipes(capsys):
    assert main(["sensitivity", "net.py:make", "--formats", "mxfp8, mxfp4", "--json"]) == 0
    result = {row["candidate"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert result == {"mxfp8_e4m3{32}", "mxfp4_e2m1{32}(even,even)"}


def test_a_model_in_which_nothing_is_quantized(capsys):
    assert main(["sensitivity", "net.py:text"]) == 2
    assert "quantizes nothing of the model" in capsys.readouterr().err
