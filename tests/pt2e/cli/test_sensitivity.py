import json

import pytest

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
    assert lines[1].split()[1] == "mxfp4_e2m1{32}(even,even)"  # as the recipe of the name has it
    assert "measure" in err
    assert main(["sensitivity", "net.py:make", "--json", "--operands", "activations", "--metric", "kl"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metric"] == "kl" and {row["operands"] for row in found["rows"]} == {"activations"}
    assert {row["module"] for row in found["rows"]} == {"0", "2", "3"}
    assert all(row["estimate"] > 0 and row["alone"] is None for row in found["rows"])


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
        (["--bits", "3", "--output", "r.yaml"], "target_bits=3.0 is below the smallest candidates"),
        (["--bits", "nan", "--output", "r.yaml"], "target_bits=nan must be a finite number"),
        (["--bits", "5", "--output", "nowhere/r.yaml"], "cannot write 'nowhere/r.yaml'"),
        (["--bits", "5", "--output", "r.yaml", "--operands", "activations"], "--bits chooses formats of weights"),
        (["--activation", "mxfp8"], "--activation is of the recipe"),
        (["--left"], "--left is measured: give --method forward or both"),
        (["--calibration", "none"], "--calibration none leaves no batch to judge by"),
    ],
)
def test_errors(arguments, text, capsys, folder):
    assert main(["sensitivity", "net.py:make", *arguments]) == 2
    out, err = capsys.readouterr()
    assert text in err and err.count("\n") == 1 and not out
    assert {file.name for file in folder.iterdir()} == {"net.py"}


def test_a_model_in_which_nothing_is_quantized(capsys):
    assert main(["sensitivity", "net.py:text"]) == 2
    assert "quantizes nothing of the model" in capsys.readouterr().err
