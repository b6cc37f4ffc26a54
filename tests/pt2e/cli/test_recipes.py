import json

import pytest

from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.quantizer import recipe

MODEL = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)), torch.ones(2, 64)
"""


def test_list(capsys):
    assert main(["recipes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    end = lines.index("")
    assert [line for line in lines[:end] if not line.startswith(" ")] == recipe.names()
    assert "  encoder 6.29 bits, cosine 0.9986" in lines and "SmolLM2" in lines[end + 1]
    assert "  as it runs: rotate inputs, quantize the cache to mxint8{32}" in lines
    (row,) = [line.split() for line in lines[end:] if line.startswith("decoder_best ")]
    assert row[1:] == ["form"] * 5 + ["no", "yes", "yes"]
    assert main(["recipes", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["recipes"]
    assert [row["recipe"] for row in rows] == recipe.names()
    assert rows[0]["destinations"]["vllm"] == "no" and rows[0]["needs"][0] == "rotate inputs"


def test_show_and_schema(capsys):
    assert main(["recipes", "show", "mxfp4_decoder"]) == 0
    assert capsys.readouterr().out == recipe.text("mxfp4_decoder")
    assert main(["recipes", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "pt2mx recipe"


def test_a_format_is_a_recipe(capsys):
    assert main(["recipes", "show", "fp6_e3m2{16}"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1:] == ['global: {weight: "fp6_e3m2{16}", activation: "fp6_e3m2{16}"}']
    assert main(["recipes", "check", "mxint4"]) == 0
    assert capsys.readouterr().out == "mxint4: a recipe with 1 setting\n"


def test_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "mine.yaml").write_text("module_name: {'0': {weight: mxfp4}}")
    assert main(["recipes", "check", "mine.yaml"]) == 0
    assert capsys.readouterr().out == "mine.yaml: a recipe with 1 setting\n"
    assert main(["recipes", "check", "mine.yaml", "--model", "net.py:make"]) == 0
    assert "1 of 2 operators quantized" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["show", "mxfp5"], "no recipe 'mxfp5'"),
        (["show", "mxfp8{0}"], "block_size=0 must be an integer of at least 1"),
        (["show", "binary.yaml"], "binary.yaml"),
        (["check", "broken.yaml"], 'recipe broken.yaml: while parsing a flow sequence in "broken.yaml", line 1'),
        (["check", "wrong.yaml"], "unknown key 'globl' in the recipe: did you mean 'global'"),
        (["check", "mxfp8", "--model", "nothing"], "unknown model 'nothing'"),
    ],
)
def test_errors(arguments, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text("globl: {weight: mxfp4}")
    (tmp_path / "broken.yaml").write_text("global: [mxfp4")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert main(["recipes", *arguments]) == 2
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1
