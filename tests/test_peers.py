"""The comparison with peers, on tiny models on the CPU."""

import json
import math
import re
from functools import partial
from subprocess import CalledProcessError

import pytest
import torch
import yaml
from torch import nn
from transformers import BertConfig, BertModel

from pt2mx.pt2e.language.texts import built_in_text
from tests.benchmarks import continued
from tests.benchmarks.accuracy import efficientnet, texts
from tests.benchmarks.peers import __main__ as peers
from tests.benchmarks.peers import (
    evaluation,
    figures,
    methods,
    models,
    ours,
    outcomes,
    page,
    process,
    recorded,
    results,
    torchao_int8,
    torchao_mx,
)
from tests.language_models import tiny_decoder, tokenizer_of_bytes
from tests.models import module_of


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
    with pytest.raises(ValueError, match="1 windows cannot be compared with 4"):
        figures.difference_text([0.0], values)


def test_the_interval_over_windows_and_seeds():
    """A sample draws both: equal windows leave the seeds, equal seeds leave the windows."""
    assert figures.bootstrap_interval([[0.0, 0.0], [1.0, 1.0]]) == figures.bootstrap_interval([0.0, 1.0])
    assert figures.bootstrap_interval([[0.0, 1.0]] * 3) == figures.bootstrap_interval([0.0, 1.0])
    assert figures.mean([[0.0, 1.0], [1.0, 1.0]]) == 0.75
    low, high = figures.bootstrap_interval([[0.0, 0.5], [0.5, 1.0]], share=0.7)
    assert low == 0.25 and high == 0.75
    one_seed = figures.difference_text([[0.5, 1.5], [1.5, 2.5]], [0.0, 1.0])
    assert one_seed == "+1.0000 (+0.5000 to +1.5000)"


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
    assert figures.embedding_cells(scores) == embedding
    exact = torch.tensor([[4.0, 2.0, 2.0]]).log()  # 1/2, 1/4, 1/4
    scores = figures.classes([torch.zeros(1, 3), exact], windows, [exact, exact])
    kl = math.log(1.5) / 2 + math.log(0.75) / 2
    assert scores["KL"] == pytest.approx([kl, 0], abs=1e-6) and scores["same"] == [1, 1]
    cells = figures.CLASSES.cells(scores)
    assert list(cells) == [*embedding, "KL", "same class"] and cells["same class"] == "1.0000 (1.0000 to 1.0000)"
    assert cells["KL"] == f"{kl / 2:.4f} (0.0000 to {kl:.4f})"


def _at(*degrees):
    """Return embeddings of these directions, (1, 2) each."""
    turns = torch.tensor(degrees).deg2rad()
    return torch.stack([turns.cos(), turns.sin()], 1).split(1)


def test_halves_of_texts_find_each_other():
    exact, moved = _at(0, 10, 90, 130), _at(0, 100, 90, 130)
    in_float, scores = (figures.embeddings(outputs, [], exact) for outputs in (exact, moved))
    assert in_float["ranking"] == pytest.approx([1] * 4) and in_float["first"] == [1, 1, 1, 1]
    # the second window has come between the other text's halves
    assert scores["first"] == [0, 0, 0, 0] and scores["reciprocal rank"] == pytest.approx([1 / 2, 1 / 3, 1 / 2, 1 / 2])
    assert scores["ranking"] == pytest.approx([0.5, -0.5, 0.5, 0.5])
    assert scores["1 - cosine"] == pytest.approx([0, 1, 0, 0], abs=1e-6)
    assert figures.EMBEDDING.cells(in_float)["recall@1"] == "1.0000 (1.0000 to 1.0000)"


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
    "efficientnet-lite0": lambda layers: (_tiny_cnn(), None),
}


#: linear layers of a decoder whose inputs and weights change sign in every second channel
_SIGNED = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"


def _quantize_rotated(job):
    """Round to nearest after a rotation that changes signs only, with which rounding commutes."""
    weights = torchao_mx.quantize(job)
    for name, linear in job.model.named_modules():
        if name.endswith(_SIGNED):
            signs = process.rotation_matrix(linear, lambda inputs: inputs * inputs.new_tensor([1, -1]).repeat(32))
            weights[f"{name}.weight"] = weights[f"{name}.weight"] @ signs
            weights[process.ROTATION.format(name)] = signs
    return weights


def _quantize_by_chance(job):
    """Return the weights of torchao, the first of a row without sign at chance."""
    weights = torchao_mx.quantize(job)
    weights["model.layers.0.mlp.up_proj.weight"][:, 0] *= torch.randint(2, ())
    return weights


def _refuse(job):
    raise methods.MethodError(f"no {job.format}")


#: method -> its function; others are presets of this project
QUANTIZE = {
    "torchao": torchao_mx.quantize,
    "torchao INT8": torchao_int8.quantize,
    "float": lambda job: job.model.state_dict(),
    "rotated": _quantize_rotated,
}


def _texts(packages, backward=False, read=None):
    text = built_in_text()[::-1] if backward else built_in_text()
    return (text[i : i + 512] for i in range(0, len(text), 512))


@pytest.fixture(params=LOADS)
def tiny(request, monkeypatch):
    """The name of a model of `MODELS`, in whose stead there is a tiny one."""
    changed = {"load": LOADS[request.param]}
    if request.param == "efficientnet-lite0":
        images = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(0)).split(4)
        changed["inputs"] = lambda tokenizer: images
    else:
        inputs = models.MODELS[request.param].inputs.func
        changed["inputs"] = partial(inputs, length=32, seen=4, held_out=4)
        monkeypatch.setattr(texts, "package_texts", _texts)
    monkeypatch.setitem(models.MODELS, request.param, models.MODELS[request.param]._replace(**changed))
    return request.param


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A function that runs a method in this process, in place of `run_method`."""

    def run_here(folder, method, job):
        file = folder / "job.json"
        options = {"setting": "nearest", "options": {"scale_mode": "even"}, "seed": 0, "device": "cpu"}
        file.write_text(json.dumps({**options, **job}))
        monkeypatch.setattr("sys.argv", ["", str(file)])
        process.run(QUANTIZE.get(method, ours.quantize))
        return file.with_suffix(".safetensors"), json.loads(file.with_suffix(".cost").read_text())

    return run_here


@pytest.mark.slow_cases("minilm")
@pytest.mark.parametrize("tiny", ["smollm2", "minilm"], indirect=True)
@pytest.mark.compiled_cases("smollm2")
def test_peers_are_evaluated_as_this_project_is(tiny, run, tmp_path):
    evaluated = evaluation.Evaluation(tmp_path, models.MODELS[tiny], 1, tmp_path / "kept")
    job = {"auto": models.MODELS[tiny].auto, "model_name": tiny}
    in_float, loss = evaluated.of_float(), models.MODELS[tiny].metric.loss
    assert in_float["test"][loss] + in_float["validation"][loss] == pytest.approx([0] * 8, abs=1e-6)
    by_format = []
    for name in ("W4", "W4A4"):
        nearest, torchao = (
            evaluated.of_result(run(tmp_path, method, {**job, "format": name})[0], name)
            for method in ("pt2mx", "torchao")
        )
        for part in process.EVALUATED:
            assert nearest[part][loss] == pytest.approx(torchao[part][loss], rel=1e-3)
            assert min(nearest[part][loss]) > 1e-5
        assert nearest["test"] != nearest["validation"]
        by_format.append(nearest)
    assert by_format[0] != by_format[1]
    assert evaluated.of_float() == in_float  # the model has its own weights again
    with pytest.raises(ValueError, match=r"of the values of \S+ are not fp4_e2m1"):
        evaluated.of_result(run(tmp_path, "float", {**job, "format": "W4"})[0], "W4")


@pytest.mark.parametrize("tiny", ["smollm2"], indirect=True)
def test_rotations_of_inputs_are_evaluated(tiny, run, tmp_path):
    evaluated = evaluation.Evaluation(tmp_path, models.MODELS[tiny], 1, tmp_path / "kept")
    job = {"auto": models.MODELS[tiny].auto, "model_name": tiny}
    for name in ("W4", "W4A4"):
        nearest, rotated = (
            evaluated.of_result(run(tmp_path, method, {**job, "format": name})[0], name)["test"]["KL"]
            for method in ("torchao", "rotated")
        )
        assert rotated == pytest.approx(nearest, rel=1e-4)


@pytest.mark.compiled
@pytest.mark.slow_except("efficientnet-lite0")
def test_results_of_earlier_runs_are_shown(tiny, run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    name = models.MODELS[tiny].formats[0]
    command = ["--model", tiny, "--formats", name, "--layers", "1", "--methods", "pt2mx", "--settings"]
    ran = []
    monkeypatch.setattr(
        peers, "run_method", lambda folder, method, job: (ran.append(job["setting"]), run(folder, method, job))[1]
    )
    peers.main([*command, "balanced"])
    folder = tmp_path / "results" / f"{tiny}-1"
    windows = [process.inputs_file(folder, part).read_bytes() for part in process.EVALUATED]
    capsys.readouterr()
    peers.main([*command, "nearest", "balanced"])
    assert ran == ["balanced", "nearest"]
    first, second = (text.splitlines() for text in capsys.readouterr().out.split("\n\n")[:2])
    assert first[0] == "The best setting of each method:" and second[0] == "All settings:"
    header, in_float, best = (re.split("  +", line) for line in first[1:])
    assert header[:6] == ["format", "method", "setting", "rotates inputs", "seeds", "validation"]
    assert in_float[0] == "float" and best[:2] == [name, "pt2mx"]
    kept, loss = results.Results(folder), models.MODELS[tiny].metric.loss
    both = {s: kept.load(results.Run("pt2mx", s, name)).scores for s in ("nearest", "balanced")}
    assert best[2] == min(both, key=lambda setting: sum(both[setting]["validation"][loss]))
    peers.main([*command, "nearest", "--again"])
    assert ran == ["balanced", "nearest", "nearest"]
    assert [process.inputs_file(folder, part).read_bytes() for part in process.EVALUATED] == windows


def _outcome(setting, *seeds, method="peer", refusal=""):
    """Return the outcome of losses for validation and test, a pair for each seed."""
    made = [{part: {"KL": pair[i]} for i, part in enumerate(process.EVALUATED)} for pair in seeds]
    return outcomes.Outcome(
        results.Run(method, setting, "W4"), [results.Result(scores, 3.5, 120, "cpu", "2026-11-27") for scores in made]
    )


def test_the_best_setting_is_chosen_by_validation():
    """The test inputs have no say, and seeds count alike."""
    first = _outcome("first", ([0.3, 0.5], [0.1, 0.1]))
    second = _outcome("second", ([0.2, 0.2], [0.7, 0.9]), ([0.4, 0.4], [0.5, 0.7]))
    ours = _outcome("balanced", ([0.3, 0.3], [0.2, 0.4]), method="pt2mx")
    chosen = outcomes.best([first, second, ours], "KL")
    assert [outcome.run.setting for outcome in chosen] == ["second", "balanced"]
    metric = figures.Metric(figures.divergences, lambda scores: {"KL": figures.mean_text(scores["KL"])}, "KL")
    of_first, of_second, of_ours = outcomes.rows([first, second, ours], chosen, metric)
    assert of_first["over pt2mx"] == "-0.2000 (-0.3000 to -0.1000)" and "over pt2mx" not in of_ours
    assert of_second["over pt2mx"] == "+0.4000 (+0.3000 to +0.5000)" and of_second["seeds"] == 2
    assert of_second["validation"] == "0.3000" and of_second["KL"].startswith("0.7000 (")


@pytest.mark.compiled
@pytest.mark.parametrize("tiny", ["smollm2"], indirect=True)
def test_seeds_and_refusals(tiny, run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "run_method", lambda folder, method, job: run(folder, job["setting"], job))
    monkeypatch.setitem(QUANTIZE, "by chance", _quantize_by_chance)
    monkeypatch.setitem(QUANTIZE, "refused", _refuse)
    options = {"scale_mode": "even"}
    fake = methods.Method("ours", {"torchao": options, "by chance": options, "float": {}, "refused": {}}, random=True)
    monkeypatch.setitem(methods.METHODS, "fake", fake)
    peers.main(["--formats", "W4", "--layers", "1", "--methods", "fake", "--seeds", "3"])
    printed = capsys.readouterr().out
    best, settings = (text.splitlines()[3:] for text in printed.split("\n\n")[:2])
    assert [line.split("  ")[0] for line in settings] == ["W4"] * 2 and len(best) == 1
    assert "W4, fake, refused, seed 0 refuses: no W4\n" in printed
    assert re.search(r"W4, fake, float, seed 0 refuses: .* of the values of \S+ are not fp4_e2m1", printed)
    kept = results.Results(tmp_path / "results" / "smollm2-1")
    seeds = {
        s: [kept.load(results.Run("fake", s, "W4", seed)).scores for seed in range(3)] for s in list(fake.settings)[:2]
    }
    assert seeds["torchao"][0] == seeds["torchao"][1] and seeds["by chance"][0] != seeds["by chance"][1]
    assert kept.load(results.Run("fake", "refused", "W4")).refusal == "no W4"


def test_validation_and_test_read_different_files(monkeypatch, tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.py").write_text(f'"""{f"file {i} " * 40}"""\n')
    monkeypatch.setattr(texts, "folder", lambda name: tmp_path)
    seen, validation, test = texts.calibration_and_held_out(tokenizer_of_bytes(), length=40, seen=2, held_out=3)
    assert seen.shape == (2, 40) and validation.shape == test.shape == (3, 40)
    files = [set(re.findall(r"file \d", texts.package_text(["any"], 800, backward))) for backward in (False, True)]
    assert all(len(names) == 3 for names in files) and not files[0] & files[1]


@pytest.mark.parametrize("tiny", ["efficientnet-lite0"], indirect=True)
@pytest.mark.compiled_cases("efficientnet-lite0")
def test_static_int8_of_a_cnn(tiny, run, tmp_path):
    """Every layer has weights of one scale per channel, also after an activation function that two layers share."""
    evaluated = evaluation.Evaluation(tmp_path, models.MODELS[tiny], None, tmp_path / "kept")
    file, _ = run(tmp_path, "torchao INT8", {"auto": "", "model_name": tiny, "format": "W8A8"})
    for scores in evaluated.of_result(file, "W8A8").values():
        assert 1e-7 < min(scores["1 - cosine"]) and max(scores["1 - cosine"]) < 1e-3
    job = process.Job(_tiny_cnn(), None, torch.randn(4, 3, 32, 32), tiny, "W8A8", "default", {}, 0, "cpu")
    targets = [str(node.target) for node in torchao_int8.quantize(job).graph.nodes]
    assert targets.count("quantized_decomposed.dequantize_per_channel.default") == 3
    assert targets.count("quantized_decomposed.quantize_per_tensor.default") >= 3


@pytest.mark.parametrize("tiny", ["efficientnet-lite0"], indirect=True)
def test_one_run_serves_several_formats(tiny, run, monkeypatch, tmp_path):
    """Weights are rounded once, and each format has outputs of its own."""
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    ran = []
    monkeypatch.setattr(
        peers, "run_method", lambda folder, method, job: (ran.append(job["format"]), run(folder, method, job))[1]
    )
    fake = methods.Method("ours", models=(tiny,), formats=methods.FP4, together=methods.FP4)
    monkeypatch.setitem(methods.METHODS, "fake", fake)
    scale = {"W4": 1, "W4A8": -1, "W4A4": 0.5}

    def by_format(job):
        scaled = {name: module_of(lambda self, x, factor=factor: factor * x) for name, factor in scale.items()}
        return {name: nn.Sequential(job.model, last) for name, last in scaled.items()}

    monkeypatch.setitem(QUANTIZE, "fake", by_format)
    peers.main(["--model", tiny, "--methods", "fake", "--formats", *methods.FP4])
    assert ran == ["W4"]
    kept = results.Results(tmp_path / "results" / f"{tiny}-all")
    losses = {name: kept.load(results.Run("fake", "default", name)).scores["test"]["1 - cosine"] for name in scale}
    assert losses["W4"] == losses["W4A4"] == pytest.approx([0] * 4, abs=1e-6)
    assert losses["W4A8"] == pytest.approx([2] * 4)


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


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_first_layers_of_a_decoder(family):
    decoder = tiny_decoder(family)
    first = models.cut(decoder, 1, tie_word_embeddings=False)
    assert len(first.model.layers) == 1 and first.lm_head.weight is not first.model.embed_tokens.weight
    weight, expected = (net.model.layers[0].mlp.up_proj.weight for net in (first, decoder))
    assert torch.equal(weight, expected)


def test_results_are_kept_per_window(tmp_path):
    scores = {"validation": {"KL": [0.25, 0.75]}, "test": {"KL": [0.5, 0.25]}}
    kept, result = results.Results(tmp_path / "new"), results.Result(scores, 3.5, 120, "cpu", "2026-11-27")
    run = results.Run("llm-compressor", "SpinQuant + GPTQ", "W4", 2)
    assert kept.load(run) is None
    kept.save(run, result)
    assert (
        kept.load(run) == result and kept.load(run._replace(seed=0)) is kept.load(run._replace(format="W4A4")) is None
    )
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["llm-compressor_SpinQuant-GPTQ_W4_2.json"]
    assert str(run) == "W4, llm-compressor, SpinQuant + GPTQ, seed 2"


def test_the_error_of_a_process():
    raised = "a warning\nTraceback (most recent call last):\n  File x\n    call()\nValueError: one\n  two\n"
    assert methods._error(raised) == "ValueError: one two"
    assert methods._error(f"{raised}\nDuring this:\n\n{raised}") == "ValueError: one two"
    assert methods._error("first\nlast\n") == "last" and methods._error("") == ""


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


def test_windows_of_minilm_are_halves_of_docstrings(monkeypatch, tmp_path):
    """Docstrings that are too short for two windows are left out."""
    for i, repeats in enumerate((70, 30, 40, 90)):
        (tmp_path / f"{i}.py").write_text(f'"""{f"text {i} " * repeats}"""\n')
    monkeypatch.setattr(texts, "folder", lambda name: tmp_path)
    monkeypatch.setattr(texts, "HELD_OUT", ("any",))
    tokenizer = tokenizer_of_bytes()
    seen, *evaluated = texts.calibration_and_halves(tokenizer, length=112, seen=2, held_out=4)
    assert seen.shape == (2, 112)
    for halves in evaluated:
        firsts, seconds = (tokenizer.batch_decode(rows) for rows in (halves[::2], halves[1::2]))
        assert firsts == seconds and {*firsts} < {f"text {i} " * 16 for i in (0, 2, 3)} and len({*firsts}) == 2


def test_the_methods_of_a_model():
    assert page.TITLES.keys() == models.MODELS.keys()
    for name in models.MODELS:
        chosen = [method for method in methods.METHODS.values() if name in method.models]
        assert {method.module for method in chosen} > {"ours"}
        for method in chosen:
            assert (methods.ROOT / "tests" / "benchmarks" / "peers" / f"{method.module}.py").exists()
            assert method.settings and json.loads(json.dumps(method.settings))
            assert method.formats is None or set(method.formats) & set(models.MODELS[name].formats)
    for name in ("efficientnet-lite0", "efficientnet-lite1"):
        assert models.MODELS[name].formats == tuple(efficientnet.FORMATS)


def test_the_quantizer_of_a_cnn():
    """Small weights are INT8, and have the activations in float that others have."""
    for name, activation in (("W4", None), ("W4A8", "mxint8"), ("W4A4", "mxfp4")):
        recipe = yaml.safe_load(efficientnet.quantizer(name, "even").to_recipe())
        small = recipe["small_weights"][efficientnet.SMALL]
        assert recipe["global"]["weight"].startswith("mxfp4") and small["weight"].startswith("mxint8")
        assert str(recipe["global"].get("activation")).startswith(str(activation))
        assert str(small.get("activation")).startswith(str(activation and "mxint8"))


def test_the_large_layers_of_a_cnn():
    """The first layer and those of few weights are INT8 by every method."""
    layers = [nn.Conv2d(64, 1024, 1), nn.ReLU(), nn.Conv2d(1024, 1024, 3, groups=1024), nn.Conv2d(1024, 33, 1)]
    model = nn.Sequential(*layers, nn.Conv2d(33, 32, 1), nn.Linear(1024, 32))
    assert efficientnet.large_layers(model) == ("3",)  # the last one has 32,768 values, which are few


def test_a_checkpoint_that_was_not_trained_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(continued, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no checkpoint: python -m tests\.benchmarks\.continued"):
        models.MODELS["smollm2-continued"].load(1)


def test_pages_are_made_of_the_measured_file(monkeypatch, tmp_path):
    """README's table has the best loss of each column in bold type, and a mark where inputs are rotated."""
    monkeypatch.setattr(page, "MEASURED", tmp_path / "measured.json")
    names = "format", "method", "rotates inputs", "validation", "KL, 95% interval", "setting", "seconds", outcomes.OVER

    def entry(*found):
        best = [dict(zip(names, row, strict=True)) for row in found]
        return {
            "windows": 2,
            "float": {"format": "float"},
            "best": best,
            "all": best,
            "refusals": {"W4, NNCF, AWQ, seed 0": "no"},
        }

    ours = "W4", "pt2mx", "yes", "0.1", "0.1000 (0.05 to 0.15)", "best", "7", ""
    peer = "W4", "torchao", "no", "0.4", "0.5000 (0.4 to 0.6)", "even", "4", "+0.4000 (+0.3 to +0.5)"
    page.record("second", entry(peer))
    page.record("minilm", entry(ours))
    page.record("minilm", entry(ours, peer))
    assert page.MEASURED.read_text().count("\n") == 2 * 11 + 2 + 2  # a line for each row
    monkeypatch.setattr(page, "COLUMNS", (("One", "minilm", "W4"), ("Two", "second", "W4")))
    monkeypatch.setattr(page, "TITLES", {"second": "The second", "minilm": "The first"})
    shown = "before\n" + page.BEGIN + "old\n" + page.END + "after\n"
    assert page.with_table(shown) == "before\n" + page.BEGIN + page.readme_table() + page.END + "after\n"
    lines = page.readme_table().splitlines()
    assert lines[:2] == ["|  | its files ran in | One | Two |", f"|{' --- |' * 4}"]
    assert "| **pt2mx** | torch, onnxruntime | **.1000**° | no recipe |" in lines
    assert "| ModelOpt 0.47 | not tried | not run | no recipe |" in lines
    assert "| NNCF 3.4 | not tried | refuses | refuses |" in lines
    assert "| torchao 0.18 | not tried | .5000 | **.5000** |" in lines
    text = page.results()
    assert text.index("## The second") < text.index("## The first") and "- W4, NNCF, AWQ: `no`" in text
    row = "torchao | no | 0.4 | 0.5000 (0.4 to 0.6) | even | 4 | +0.4000 (+0.3 to +0.5) |"
    assert f"| float |  |  |  |  |  |  |  |\n| W4 | {row}\n" in text
    assert "in 1 of 1 rows" in text
    assert "| The first | W4 | 0.1000 | torchao, even | 0.5000 | +0.4000 (+0.3 to +0.5) | 7 / 4 |" in text


def _recorded(*rows, refusals=()):
    """Return an entry of rows (method, setting, validation, loss, difference or None, seconds); the first are best."""
    names = "method", "setting", "validation", "KL, 95% interval", outcomes.OVER, "seconds"
    made = [{"format": "W4", **dict(zip(names, row, strict=True))} for row in rows]
    made = [{name: cell for name, cell in row.items() if cell is not None} for row in made]
    best = [row for i, row in enumerate(made) if row["method"] not in {before["method"] for before in made[:i]}]
    errors = {f"W4, {run}, seed 0": "no" for run in refusals}
    return {"windows": 2, "float": {"perplexity": "20.00"}, "best": best, "all": made, "refusals": errors}


def test_new_rows_join_the_recorded_ones():
    """Equal settings and refusals are replaced, and the best is chosen again."""
    ours = "pt2mx", "balanced", "0.1000", "0.2", None, "7"
    tied = ("torchao", "floor", "0.4000", "0.5", "+0.3", "4"), ("torchao", "even", "0.4000", "0.6", "+0.4", "4")
    before = _recorded(ours, *tied, refusals=["NNCF, AWQ", "Brevitas, GPTQ"])
    again = *ours[:-1], "8"
    made = (
        ("Brevitas", "GPTQ", "0.3000", "0.3", "+0.1", "9"),
        ("Brevitas", "learned round", "0.2000", "0.4", "+0.2", "9"),
    )
    joined = recorded.with_recorded(_recorded(again, *made, refusals=["torchao, even"]), before)
    assert [row["setting"] for row in joined["all"]] == ["balanced", "floor", "GPTQ", "learned round"]
    assert [row["setting"] for row in joined["best"]] == ["balanced", "floor", "learned round"]
    assert joined["all"][0]["seconds"] == "8" and joined["all"][1][outcomes.OVER] == "+0.3"
    assert list(joined["refusals"]) == ["W4, torchao, even, seed 0", "W4, NNCF, AWQ, seed 0"]
    tie = recorded.with_recorded(_recorded(*made), before)
    assert [row["setting"] for row in tie["best"]] == ["balanced", "floor", "learned round"]
    with pytest.raises(ValueError, match=r"windows are others: float is .*20\.00.*19\.00"):
        recorded.with_recorded({**before, "float": {"perplexity": "19.00"}}, before)


def test_a_difference_is_from_the_best_setting_of_all():
    first, peer = ("pt2mx", "balanced", "0.1000", "0.2", None, "7"), ("torchao", "even", "0.4000", "0.5", "+0.3", "4")
    other = "Brevitas", "GPTQ", "0.3000", "0.4", "+0.1", "9"
    for setting, validation, kept in (
        ("best", "0.2000", "+0.3"),
        ("best", "0.0500", "+0.1"),
        ("balanced", "0.1000", "+0.1"),
    ):
        entry = _recorded(("pt2mx", setting, validation, "0.3", None, "7"), other)
        rows = recorded.with_recorded(entry, _recorded(first, peer))["all"]
        assert [row[outcomes.OVER] for row in rows if outcomes.OVER in row] == [kept]


def test_the_pages_are_those_of_the_measured_file():
    assert page.RESULTS.read_text() == page.results(), "python -m tests.benchmarks.peers.page"
    assert page.README.read_text() == page.with_table(page.README.read_text()), "python -m tests.benchmarks.peers.page"


@pytest.mark.parametrize("tiny", ["smollm2"], indirect=True)
def test_weights_of_peers_serve_two_formats(tiny, run, monkeypatch, tmp_path):
    """W4A8 has the weights of W4; `--record` runs nothing."""
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(page, "MEASURED", tmp_path / "measured.json")
    ran = []
    monkeypatch.setattr(
        peers, "run_method", lambda folder, method, job: (ran.append(method), run(folder, method, job))[1]
    )
    command = ["--layers", "1", "--formats", "W4", "W4A8", "--settings", "even", "--methods", "torchao"]
    peers.main(command)
    assert ran == ["torchao"]
    kept = results.Results(tmp_path / "results" / "smollm2-1")
    weights, both = (kept.load(results.Run("torchao", "even", name)).scores["test"]["KL"] for name in ("W4", "W4A8"))
    assert all(abs(one - other) < 0.2 * one for one, other in zip(weights, both, strict=True)) and weights != both
    peers.main([*command, "pt2mx", "--record"])
    assert ran == ["torchao"]
    recorded = json.loads(page.MEASURED.read_text())["smollm2"]
    assert [row["format"] for row in recorded["best"]] == ["W4", "W4A8"] and recorded["windows"] == 4
