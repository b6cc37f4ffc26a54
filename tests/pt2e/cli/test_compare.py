import json

import pytest
import torch

import pt2mx
from pt2mx.pt2e.cli import compare
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.quantizer import recipe, shipped
from tests.factories import FACTORY

pytestmark = pytest.mark.usefixtures("few_objects")

#: models that cannot be exported
NO_EXPORT = """
import torch
from torch import nn

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 8)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x

def branch():
    return Branch(), torch.ones(4, 64)

def shape():
    return nn.Linear(64, 8), torch.ones(4, 65)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(FACTORY)
    (tmp_path / "batches").mkdir()
    for i in range(3):
        torch.save(torch.randn(8, 64, generator=torch.Generator().manual_seed(i)), tmp_path / "batches" / f"{i}.pt")
    return tmp_path


def test_table_and_json(capsys):
    assert main(["compare", "net.py:make", "--recipes", "mxfp4,mxfp8"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[1] for line in out.splitlines()[1:-2]] == ["mxfp4", "mxfp8", "float"]
    assert "net.py:make, 1 batch; load" in err and "mxfp8" in err
    assert main(["compare", "net.py:make", "--recipes", "mxfp4,mxfp8", "--json", "--metric", "kl"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["metric"] == "divergence, nats" and [row["on_front"] for row in result["rows"]] == [True] * 3


def test_numbers_are_those_of_the_function(capsys, folder):
    quantizer = pt2mx.MXQuantizer().set_module_name("2", pt2mx.get_default_mx_quantization_config("mxfp4", "mxfp4"))
    quantizer.to_recipe("mine.yaml")
    assert main(["compare", "net.py:make", "--recipes", "mine.yaml", "--json", "--calibration", "batches"]) == 0
    result = json.loads(capsys.readouterr().out)
    namespace = {}
    exec(FACTORY, namespace)
    model, x, shapes = namespace["make"]()
    exported = torch.export.export(model.eval(), (x,), dynamic_shapes=shapes).module()
    batches = [torch.load(folder / "batches" / f"{i}.pt") for i in range(3)]
    assert list(result.pop("seconds")) == ["load", "export", "float", "mine.yaml"]
    again = pt2mx.compare_recipes(exported, batches, {"mine.yaml": quantizer})
    assert json.loads(again.to_json()) == result


def test_algorithms_see_other_batches_than_judge(capsys):
    options = ["compare", "net.py:make", "--calibration", "batches"]
    assert main([*options, "--recipes", "mxfp4,mxfp4_weight_only", "--optimize", "balanced"]) == 0
    assert "1 of 3 batches are for the algorithms of recipes, the others for the comparison" in capsys.readouterr().err
    assert main(["compare", "net.py:make", "--recipes", "mxfp4_decoder"]) == 0
    assert "compared on the batch that they calibrate with" in capsys.readouterr().err
    assert main([*options, "--recipes", "mxfp4_decoder", "--optimize", "none"]) == 0
    assert "net.py:make, 3 batches" in capsys.readouterr().err


def test_recipes_of_other_tasks_are_left_out_by_default():
    chosen = {model: compare._default_recipes(model) for model in ("minilm", "torchvision:resnet18", "net.py:make")}
    assert len(chosen["net.py:make"]) == len(recipe.names()) + 2 > len(chosen["minilm"])
    for model, task in (("minilm", "encoder"), ("torchvision:resnet18", "cnn")):
        named = {name.partition("_")[0] for name in chosen[model]}
        assert set(shipped.tasks()) & named == {task} and "mxfp8" in named


def test_a_page(capsys, folder):
    options = ["compare", "net.py:make", "--recipes", "mxfp4,mxfp8_e5m2", "--output", "page.html"]
    assert main(options) == 0
    page = (folder / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "mxfp8_e5m2" in page and "mxfp4" in page and "net.py:make" in page
    capsys.readouterr()
    assert main([*options[:-1], "page.pdf"]) == 2
    assert "its name must end in .html or .htm" in capsys.readouterr().err
    assert main(["compare", "net.py:text", "--recipes", "mxfp8", "--output", "none.html"]) == 2
    assert "no recipe works, so there is no page: it selects no operator" in capsys.readouterr().err
    assert not (folder / "none.html").exists()


def test_the_page_reports_the_recipe_that_it_recommends(capsys, folder):
    """Where a larger recipe is better."""
    assert main(["compare", "net.py:make", "--recipes", "mxfp6,mxint8", "--output", "page.html"]) == 0
    assert "Recommended: mxfp6, the smallest recipe" in capsys.readouterr().out
    assert '"recipe":{"name":"mxfp6"' in (folder / "page.html").read_text()


#: a model with a layer whose result nobody uses, which conversion drops, and a batch norm that is folded
UNUSED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.pooler = nn.Conv2d(32, 32, 1), nn.BatchNorm2d(32), nn.Linear(64, 64)

    def forward(self, x):
        y = self.norm(self.conv(x))
        self.pooler(y.flatten(1))
        return y

def make():
    return Net().eval(), torch.randn(4, 32, 2, 1)
"""


@pytest.mark.parametrize("optimize", ["none", "fast"])
def test_the_page_and_the_table_say_one_size_of_the_float_model(optimize, capsys, folder):
    (folder / "unused.py").write_text(UNUSED)
    options = ["--recipes", "mxint8", "--optimize", optimize, "--output", "page.html", "--json"]
    assert main(["compare", "unused.py:make", *options]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    page, before = (folder / "page.html").read_text(), 4 * (32 * 32 + 5 * 32 + 65 * 64)
    assert rows["float"]["bytes"] == before and f'"totals":{{"before":{before},' in page
    assert rows["mxint8"]["bytes"] == 32 * 33 + 4 * 32 and rows["mxint8"]["bits"] == 8 * 1184 / (before / 4)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "unknown model 'nothing'"),
        (["onnx:net.onnx"], "an ONNX file is not taken here"),
        (["net.py:make", "--recipes", "mxfp5"], "no recipe 'mxfp5'"),
        (["net.py:make", "--calibration", "none"], "--calibration none leaves no batch to evaluate on"),
        (["net.py:make", "--calibration", "nowhere"], "no file or folder 'nowhere': give a folder of batches"),
        (["net.py:broken"], "NaN or Inf in the weights 0.weight"),
    ],
)
def test_errors(arguments, text, capsys):
    assert main(["compare", *arguments]) == 2
    out, err = capsys.readouterr()
    assert text in err and err.count("\n") == 1 and not out


def test_names_with_blanks_are_those_of_recipes(capsys):
    assert main(["compare", "net.py:make", "--recipes", "mxfp4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert main(["compare", "net.py:make", "--recipes", " mxfp4 ", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == rows  # not the numbers of the format, which has other scales


def test_no_file_that_is_read_is_written(capsys, folder):
    (folder / "mine.html").write_text("global: {weight: mxfp8}")
    assert main(["compare", "net.py:make", "--recipes", "mine.html", "--output", "./mine.html"]) == 2
    assert "the recipe 'mine.html' and --output are one file" in capsys.readouterr().err
    assert (folder / "mine.html").read_text() == "global: {weight: mxfp8}"


def test_models_without_weights(capsys):
    assert main(["compare", "net.py:text", "--recipes", "mxfp8"]) == 0
    assert "it selects no operator of the model" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text"), [("branch", "data-dependent expression"), ("shape", "same reduction dim")])
def test_an_export_that_fails_is_one_line(name, text, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    (tmp_path / "fails.py").write_text(NO_EXPORT)
    assert main(["compare", f"{tmp_path}/fails.py:{name}", "--recipes", "mxfp8"]) == 2
    out, err = capfd.readouterr()
    assert not out and err.startswith("pt2mx: error: could not export the model: ")
    assert text in err and err.count("\n") == 1
