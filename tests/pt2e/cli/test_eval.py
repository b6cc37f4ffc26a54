"""The command `pt2mx eval`. lm-eval brings many packages, so it is installed for one test alone."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from pt2mx import LanguageModel
from pt2mx.pt2e.cli.command import main
from tests.environments import PINNED, environment
from tests.language_models import checkpoint

ROOT = Path(__file__).parents[3]
QUESTIONS = (("The sky is", ("blue", "red and more")), ("Grass is", ("black", "green")), ("Snow is", ("white", "hot")))
#: task -> its YAML
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "0",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "cloze": {
        "output_type": "loglikelihood",
        "doc_to_target": " {{choices[0]}}",
        "metric_list": [{"metric": "perplexity"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5},
        "metric_list": [{"metric": "exact_match"}],
    },
}


#: a float model gives lm-eval the results that it gives as lm-eval's own model `hf`
LIKE_HF = """
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import processors

from pt2mx import LanguageModel
from pt2mx.pt2e.language.decoder import export_decoder
from pt2mx.pt2e.language.harness import HarnessModel
from tests.language_models import tiny_decoder, tokenizer_of_bytes

model, tokenizer = tiny_decoder("llama", num_hidden_layers=1), tokenizer_of_bytes()
first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
tokenizer.backend_tokenizer.post_processor, tokenizer.pad_token = first, "</s>"
exported = LanguageModel(export_decoder(model), model.config, tokenizer=tokenizer)
models = (
    HarnessModel(exported, batch_size=3, max_length=24),
    HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=24),
)

def results(kind, *arguments):
    requests = [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]
    return [getattr(model, kind)(requests) for model in models]

long = "A text of more than twenty-four tokens"
pairs = [("", "x"), ("The sky is ", "blue"), ("The sky is", " blue"), (long, " end")]
pairs += [("<s>Q", " a"), ("Q", " a"), ("Q", " b")]
for (ours, same), (theirs, also_same) in zip(*results("loglikelihood", *pairs)):
    assert abs(ours - theirs) < 1e-4 and same == also_same, (ours, theirs)
for ours, theirs in zip(*results("loglikelihood_rolling", ("short",), (long,), ("",))):
    assert abs(ours - theirs) < 1e-3, (ours, theirs)
options = [{"until": ["q", "z"], "max_gen_toks": 6}, {"until": [], "max_gen_toks": 8}]
options += [{"until": "q", "max_gen_toks": 5, "temperature": 0.0}]
ours, theirs = results("generate_until", *zip(("The sky is", long, "Snow"), options))
assert ours == theirs and all(ours), (ours, theirs)
"""


@pytest.fixture(scope="module")
def in_environment(tmp_path_factory):
    """Run a command with the python of an environment that has lm-eval, offline."""
    folder = tmp_path_factory.mktemp("environment")
    python = environment(folder / "lm-eval", *PINNED, "lm-eval")
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}

    def run(*arguments, cwd=ROOT):
        command = [str(python), *arguments]
        return subprocess.run(command, cwd=cwd, env={**os.environ, **offline}, capture_output=True, text=True)

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with "quantized", a language model."""
    path = tmp_path_factory.mktemp("eval")
    checkpoint("llama", path / "llama", num_hidden_layers=1)
    model, output = f"hf:{path}/llama", str(path / "quantized")
    assert main(["quantize", "--model", model, "--recipe", "mxfp4_weight_only", "--output", output]) == 0
    return path


@pytest.mark.compiled
def test_where_it_is_not_installed(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    status, out, err = run("eval", "quantized", "--tasks", "gsm8k")
    assert (status, out) == (2, "") and err == "pt2mx: error: lm_eval is not installed: pip install 'pt2mx[eval]'\n"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--limit", "0"), "--limit 0 must be at least 1"),
        (("--batch-size", "-1"), "--batch-size -1 must be at least 1"),
        (("--max-length", "0"), "--max-length 0 must be at least 1"),
        (("--fewshot", "-1"), "--fewshot -1 must be at least 0"),
        (("--include-path", "nowhere"), "--include-path 'nowhere' is no folder"),
        (("--output", "a.txt"), "cannot write 'a.txt': its name must end in .json"),
    ],
)
def test_options_are_checked_before_the_work(run, options, text):
    status, out, err = run("eval", "quantized", "--tasks", "gsm8k", *options)
    assert (status, out) == (2, "") and text in err


def scores(model, question, answer):
    """The log-likelihood of the tokens of an answer, one after the other."""
    first, last = (model.tokenizer(text)["input_ids"] for text in (question, question + answer))
    with torch.no_grad():
        log = model(torch.tensor([last])).logits[0].double().log_softmax(-1)
    return [float(log[column - 1, last[column]]) for column in range(len(first), len(last))]


def continued(model, question, length):
    tokens = model.tokenizer(question)["input_ids"]
    for _ in range(length):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return model.tokenizer.decode(tokens, skip_special_tokens=True)[len(question) :].partition("\n")[0]


@pytest.mark.slow
def test_results_are_those_of_lm_eval_for_the_float_model(in_environment):
    done = in_environment("-c", LIKE_HF)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_tasks_of_files(place, in_environment):
    """The metrics that lm-eval prints are computed again from the logits of the model."""
    model = LanguageModel.from_pretrained(place / "quantized")
    texts = [continued(model, question, 5) for question, _ in QUESTIONS]
    answers = [*texts[:2], "another"]
    rows = [
        {"question": question, "choices": choices, "answer": answer}
        for (question, choices), answer in zip(QUESTIONS, answers, strict=True)
    ]
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "tasks").mkdir()
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}, "test_split": "test"}
    for name, fields in TASKS.items():
        task = {"task": f"tiny_{name}", "doc_to_text": "{{question}}", **data, **fields}
        (place / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(task))

    def evaluate(*options):
        return in_environment("-m", "pt2mx", "eval", "quantized", *options, cwd=place)

    done = evaluate("--tasks", "tiny_*", "--include-path", "tasks", "--batch-size", "3", "--json", "--output", "o.json")
    assert done.returncode == 0, done.stderr
    printed, written = json.loads(done.stdout), json.loads((place / "o.json").read_text())
    assert printed["results"] == written["results"] and set(printed["results"]) == {f"tiny_{name}" for name in TASKS}
    results = {
        (task.removeprefix("tiny_"), metric.removesuffix(",none")): value
        for task, metrics in printed["results"].items()
        for metric, value in metrics.items()
    }
    sums = [[sum(scores(model, question, f" {choice}")) for choice in choices] for question, choices in QUESTIONS]
    lengths = [[len(choice) for choice in choices] for _, choices in QUESTIONS]
    assert results["choice", "acc"] == pytest.approx(sum(first >= second for first, second in sums) / 3)
    by_length = [
        [value / length for value, length in zip(row, of_row, strict=True)]
        for row, of_row in zip(sums, lengths, strict=True)
    ]
    assert results["choice", "acc_norm"] == pytest.approx(sum(first >= second for first, second in by_length) / 3)
    mean = sum(row[0] for row in sums) / 3
    assert results["cloze", "perplexity"] == pytest.approx(math.exp(-mean), rel=1e-4)
    total = sum(sum(scores(model, "<s>", question)) for question, _ in QUESTIONS)
    size = sum(len(question) for question, _ in QUESTIONS)
    assert results["rolling", "byte_perplexity"] == pytest.approx(math.exp(-total / size), rel=1e-4)
    assert results["answer", "exact_match"] == pytest.approx(2 / 3)

    limited = evaluate("--tasks", "tiny_choice", "--include-path", "tasks", "--limit", "2", "--fewshot", "0")
    assert limited.returncode == 0 and "tiny_choice" in limited.stdout and "acc_norm" in limited.stdout
    for task, text in (("gsm8k", "could not evaluate gsm8k: ConnectionError"), ("tiny_choise", "unknown task")):
        failed = evaluate("--tasks", task)
        assert failed.returncode == 2 and f"pt2mx: error: {text}" in failed.stderr and not failed.stdout
