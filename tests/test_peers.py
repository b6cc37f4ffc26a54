"""The comparison with peers, on tiny models on the CPU."""

import json
import math
import re
from functools import partial
from subprocess import CalledProcessError

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from pt2mx.pt2e.language.texts import built_in_text
from tests.benchmarks.accuracy import efficientnet, texts
from tests.benchmarks.peers import __main__ as peers
from tests.benchmarks.peers import (
    evaluation,
    figures,
    methods,
    models,
    ours,
    process,
    results,
    torchao_int8,
    torchao_mx,
)
from tests.language_models import tiny_decoder, tokenizer_of_bytes


def test_the_interval_of_a_mean():
    assert figures.bootstrap_interval([0.25] * 16) == (0.25, 0.25)
    assert figures.bootstrap_interval([0.0, 1.0]) == (0, 1)  # each end has a quarter of the samples
    assert figures.bootstrap_interval([0.0, 1.0], share=0.4) == (0.5, 0.5)
    values = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    low, high = figures.bootstrap_interval(values.tolist())
    error = 1.96 * float(values.std()) / 20
    assert (low, high) == pytest.approx((float(values.mean()) - error, float(values.mean()) + error), abs=0.01)


def test_the_interval_of_a_difference():
    """A window that is equally hard for two methods adds nothing to the interval of their difference."""
    values = [0.1, 0.5, 0.9, 1.3]
    assert figures.difference_text([value + 0.25 for value in values], values) == "+0.2500 (+0.2500 to +0.2500)"
    assert figures.difference_text([0.0, 1.0], [1.0, 1.0]) == "-0.5000 (-1.0000 to +0.0000)"
    assert figures.mean_text(values) == "0.7000 (0.3000 to 1.1000)"
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is longer"):
        figures.difference_text([0.0], values)


def test_figures_of_known_predictions():
    windows = [torch.tensor([[0, 1, 2]]), torch.tensor([[0, 2, 2]])]
    even = torch.zeros(1, 3, 3)
    first = torch.tensor([2.0, 1.0, 1.0]).log().expand(1, 3, 3)  # 1/2, 1/4, 1/4
    kl = (2 * math.log(4 / 3) + math.log(2 / 3)) / 3
    scores = figures.divergences([first, first], windows, [even, first])
    assert scores["KL"] == pytest.approx([kl, 0]) and scores["log-perplexity"] == pytest.approx([math.log(4)] * 2)
    assert figures.DIVERGENCE.cells(scores) == {
        "perplexity": "4.00",
        "KL, 95% interval": f"{kl / 2:.4f} (0.0000 to {kl:.4f})",
        "same argmax": "100.0%",
    }
    expected = [torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]])]
    scores = figures.cosines([torch.tensor([[1.0, 0.0]])] * 2, windows, expected)
    assert scores["1 - cosine"] == pytest.approx([0.4, 0]) and scores["same"] == [0, 1]
    embedding = {"1 - cosine, 95% interval": "0.2000 (0.0000 to 0.4000)", "worst": "0.6000"}
    assert figures.EMBEDDING.cells(scores) == embedding
    assert figures.CLASSES.cells(scores) == {**embedding, "same class": "50%"}


def _tiny_bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 300}
    return BertModel(BertConfig(**sizes, num_hidden_layers=2, initializer_range=0.5))


def _tiny_cnn():
    torch.manual_seed(0)
    shared, pooled = nn.ReLU6(), nn.AdaptiveAvgPool2d(1)
    convolutions = nn.Conv2d(3, 32, 3, stride=2), shared, nn.Conv2d(32, 32, 3), shared
    return nn.Sequential(*convolutions, pooled, nn.Flatten(), nn.Linear(32, 10)).eval()


LOADS = {
    "smollm2": lambda layers: (
        models.cut(tiny_decoder("llama"), layers, tie_word_embeddings=False),
        tokenizer_of_bytes(),
    ),
    "minilm": lambda layers: (models.cut(_tiny_bert(), layers), tokenizer_of_bytes()),
    "efficientnet": lambda layers: (_tiny_cnn(), None),
}


#: method -> its function; others are presets of this project
QUANTIZE = {
    "torchao": torchao_mx.quantize,
    "torchao INT8": torchao_int8.quantize,
    "float": lambda job: job.model.state_dict(),
}


@pytest.fixture(params=LOADS)
def tiny(request, monkeypatch):
    """The name of a model of `MODELS`, in whose stead there is a tiny one."""
    changed = {"load": LOADS[request.param]}
    if request.param == "efficientnet":
        images = torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(0)).split([4, 3])
        changed["inputs"] = lambda tokenizer: images
    else:
        changed["inputs"] = partial(texts.calibration_and_held_out, length=32, seen=4, held_out=3)
        monkeypatch.setattr(texts, "package_text", lambda packages, length: built_in_text()[: length // 8])
    monkeypatch.setitem(models.MODELS, request.param, models.MODELS[request.param]._replace(**changed))
    return request.param


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A function that runs a method in this process, in place of `run_method`."""

    def run_here(folder, method, job):
        file = folder / "job.json"
        file.write_text(json.dumps({"method": method, "iterations": 1, "device": "cpu", **job}))
        monkeypatch.setattr("sys.argv", ["", str(file)])
        process.run(QUANTIZE.get(method, ours.quantize))
        return file.with_suffix(".safetensors"), json.loads(file.with_suffix(".cost").read_text())

    return run_here


@pytest.mark.slow_cases("minilm")
@pytest.mark.parametrize("tiny", ["smollm2", "minilm"], indirect=True)
def test_peers_are_evaluated_as_this_project_is(tiny, run, tmp_path):
    evaluated = evaluation.Evaluation(tmp_path, models.MODELS[tiny], 1, tmp_path / "kept")
    job = {"auto": models.MODELS[tiny].auto, "model_name": tiny}
    in_float, loss = evaluated.of_float(), models.MODELS[tiny].metric.loss
    assert in_float[loss] == pytest.approx([0, 0, 0], abs=1e-6)
    by_format = []
    for name in ("W4", "W4A4"):
        nearest, torchao = (
            evaluated.of_result(run(tmp_path, method, {**job, "format": name})[0], name)
            for method in ("nearest", "torchao")
        )
        assert nearest[loss] == pytest.approx(torchao[loss], rel=1e-3) and min(nearest[loss]) > 1e-5
        by_format.append(nearest)
    assert by_format[0] != by_format[1]
    assert evaluated.of_float() == in_float  # the model has its own weights again
    with pytest.raises(ValueError, match=r"of the values of \S+ are not fp4_e2m1"):
        evaluated.of_result(run(tmp_path, "float", {**job, "format": "W4"})[0], "W4")


@pytest.mark.slow_except("efficientnet")
def test_results_of_earlier_runs_are_shown(tiny, run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "run_method", run)
    name = models.MODELS[tiny].formats[0]
    command = ["--model", tiny, "--formats", name, "--layers", "1", "--methods"]
    peers.main([*command, "balanced"])
    windows = (tmp_path / "results" / f"{tiny}-1" / process.HELD_OUT).read_bytes()
    ran = []
    monkeypatch.setattr(
        peers, "run_method", lambda folder, method, job: (ran.append(method), run(folder, method, job))[1]
    )
    capsys.readouterr()
    peers.main([*command, "nearest", "balanced"])
    assert ran == ["nearest"]
    header, in_float, nearest, balanced = (re.split("  +", line) for line in capsys.readouterr().out.splitlines()[:4])
    assert header[:2] == ["format", "method"] and header[-4:] == ["over balanced", "seconds", "peak MB", "on"]
    assert in_float[0] == "float" and nearest[:2] == [name, "nearest"] and balanced[:2] == [name, "balanced"]
    kept = results.Results(tmp_path / "results" / f"{tiny}-1")
    both = [kept.load(method, name).scores[models.MODELS[tiny].metric.loss] for method in ("nearest", "balanced")]
    assert nearest[-4] == figures.difference_text(*both) and "over balanced" not in balanced
    assert float(nearest[-2]) > 100 and nearest[-1].startswith("cpu, 20")
    peers.main([*command, "nearest", "--again"])
    assert ran == ["nearest"] * 2
    assert (tmp_path / "results" / f"{tiny}-1" / process.HELD_OUT).read_bytes() == windows


@pytest.mark.parametrize("tiny", ["efficientnet"], indirect=True)
@pytest.mark.compiled_cases("efficientnet")
def test_static_int8_of_a_cnn(tiny, run, tmp_path):
    """Every layer has weights of one scale per channel, also after an activation function that two layers share."""
    evaluated = evaluation.Evaluation(tmp_path, models.MODELS[tiny], None, tmp_path / "kept")
    file, _ = run(tmp_path, "torchao INT8", {"auto": "", "model_name": tiny, "format": "W8A8"})
    losses = evaluated.of_result(file, "W8A8")["1 - cosine"]
    assert 1e-7 < min(losses) and max(losses) < 1e-3
    job = process.Job(_tiny_cnn(), None, torch.randn(4, 3, 32, 32), tiny, "torchao INT8", "W8A8", 0, "cpu")
    targets = [str(node.target) for node in torchao_int8.quantize(job).graph.nodes]
    assert targets.count("quantized_decomposed.dequantize_per_channel.default") == 3
    assert targets.count("quantized_decomposed.quantize_per_tensor.default") >= 3


class _PaddingConv(nn.Conv2d):
    def __init__(self):
        super().__init__(4, 8, 3, stride=2, groups=2, bias=False)
        self.static_padding = nn.ZeroPad2d((0, 1, 1, 0))

    def forward(self, x):
        return super().forward(self.static_padding(x))


def test_convolutions_that_pad_become_plain():
    torch.manual_seed(0)
    model, x = nn.Sequential(_PaddingConv(), nn.ReLU()), torch.randn(2, 4, 9, 9)
    expected = model(x)
    plain = models.with_plain_convolutions(model)
    assert torch.equal(plain(x), expected) and type(plain[0][1]) is nn.Conv2d


def test_results_are_kept_per_window(tmp_path):
    kept, result = results.Results(tmp_path / "new"), results.Result({"KL": [0.5, 0.25]}, 3.5, 120, "cpu", "2026-11-27")
    assert kept.load("SpinQuant + GPTQ", "W4") is None
    kept.save("SpinQuant + GPTQ", "W4", result)
    assert kept.load("SpinQuant + GPTQ", "W4") == result and kept.load("SpinQuant + GPTQ", "W4A4") is None
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["SpinQuant-GPTQ_W4.json"]


def test_a_peer_that_cannot_run_is_named(monkeypatch, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.setitem(methods.METHODS, "broken", methods.Method("no_such_module"))
    with pytest.raises(methods.MethodError, match=r"No module named tests\.benchmarks\.peers\.no_such_module"):
        methods.run_method(tmp_path, "broken", {"format": "W4"})
    monkeypatch.setattr(methods, "FOLDER", tmp_path)
    monkeypatch.setattr(methods, "environment", lambda *given: (_ for _ in ()).throw(CalledProcessError(1, "pip")))
    (tmp_path / "unknown").mkdir()
    with pytest.raises(methods.MethodError, match=r"pip install unknown==1\.0 failed"):
        methods._python("unknown==1.0")
    assert not (tmp_path / "unknown").exists()


def test_the_environment_of_a_peer(tmp_path, monkeypatch):
    """A peer that is installed runs in this environment; another version does not."""
    monkeypatch.setattr(methods, "FOLDER", tmp_path)
    monkeypatch.setattr(methods, "environment", lambda folder, *requirements: (folder, requirements))
    here = methods.sys.executable
    assert str(methods._python(None)) == str(methods._python(f"torch=={torch.__version__}")) == here
    assert methods._python("torch==1.0") == (
        tmp_path / "torch",
        (f"torch=={torch.__version__.partition('+')[0]}", "torch==1.0"),
    )


def test_the_methods_of_a_model():
    for name in models.MODELS:
        chosen = [method for method in methods.METHODS.values() if name in method.models]
        assert {method.module for method in chosen} > {"ours"}
        for method in chosen:
            assert (methods.ROOT / "tests" / "benchmarks" / "peers" / f"{method.module}.py").exists()
            assert method.formats is None or set(method.formats) & set(models.MODELS[name].formats)
    assert models.MODELS["efficientnet"].formats == tuple(efficientnet.FORMATS)
