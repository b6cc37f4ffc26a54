"""The commands for language models, from a checkpoint's folder to text."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from pt2mx import LanguageModel
from pt2mx.pt2e.cli import language
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.language.texts import blocks, perplexity, read_text
from pt2mx.pt2e.models.tokenizers import load_tokenizer
from tests.language_models import checkpoint, transformers

QUANTIZE = ("quantize", "--recipe", "mxfp8", "--model")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a checkpoint, "llama", and the folder "quantized" that `pt2mx quantize` writes."""
    path = tmp_path_factory.mktemp("language")
    checkpoint("llama", path / "llama", num_hidden_layers=1)
    (path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 10)
    model, output = f"hf:{path}/llama", str(path / "quantized")
    assert main(["quantize", "--model", model, "--recipe", "mxfp4_weight_only", "--output", output]) == 0
    return path


@pytest.fixture(scope="module")
def load_once():
    return functools.cache(LanguageModel.from_pretrained)


@pytest.fixture
def loaded_once(load_once, monkeypatch):
    """Load a folder once for all tests: generating and evaluating change no model."""
    monkeypatch.setattr(LanguageModel, "from_pretrained", load_once)


def test_the_folder(place):
    names = {"config.json", "generation_config.json", "program.pt2", "report.json", "tokenizer.json"}
    assert names <= {file.name for file in (place / "quantized").iterdir()}
    report = json.loads((place / "quantized" / "report.json").read_text())
    assert sum(any(operand["spec"] for operand in row["operands"]) for row in report["operators"]) == 9


@pytest.mark.usefixtures("loaded_once")
def test_generate(run):
    arguments = ("generate", "quantized", "--prompt", "Hello", "--max-new-tokens", "12")
    status, out, err = run(*arguments)
    assert status == 0 and re.search(r"first token after [\d.]+ s", err)
    assert run(*arguments)[1] == out
    sampled = [run(*arguments, "--temperature", "5", "--seed", seed)[1] for seed in "001"]
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.usefixtures("loaded_once")
def test_generate_answers_all_prompts(run):
    lengths = ("--max-new-tokens", "8", "--json")
    alone = [json.loads(run("generate", "quantized", "--prompt", each, *lengths)[1])["answers"] for each in "ab"]
    status, out, err = run("generate", "quantized", "--prompt", "a", "--prompt=b", *lengths)
    answers = json.loads(out)["answers"]
    assert status == 0 and err.count("first token after") == 1, "they are one batch"
    assert [(answer["prompt"], answer["text"]) for answer in answers] == [
        ("a", alone[0][0]["text"]),
        ("b", alone[1][0]["text"]),
    ]


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--top-p", "1.5", "a number from 0 to 1"),
        ("--top-p", "nan", "a number from 0 to 1"),
        ("--top-k", "-1", "an integer of at least 0, which is all tokens"),
        ("--temperature", "-0.5", "a finite number of at least 0"),
        ("--temperature", "inf", "a finite number of at least 0"),
        ("--repetition-penalty", "0.0", "a finite number above 0"),
        ("--seed", str(2**64), f"an integer from {-(2**63)} to {2**64 - 1}"),
        ("--max-new-tokens", "0", "at least 1"),
    ],
)
def test_options_of_sampling_are_checked_before_the_model_is_loaded(run, option, value, allowed):
    more = () if option == "--temperature" else ("--temperature", "1")
    status, out, err = run("generate", "nowhere", "--prompt", "a", option, value, *more)
    assert (status, out, err) == (2, "", f"pt2mx: error: {option} {value} must be {allowed}\n")


@pytest.mark.usefixtures("loaded_once")
def test_generate_asks_for_prompts(run, monkeypatch, tmp_path):
    (tmp_path / "prompts").write_text("Hello\n\nWorld\n")
    with open(tmp_path / "prompts") as file:
        monkeypatch.setattr("sys.stdin", file)
        status, _, err = run("generate", "quantized", "--max-new-tokens", "3")
    assert status == 0 and err.count("first token after") == 2


@pytest.mark.parametrize(
    ("option", "name"),
    [(("--output", "x.pt2"), "--output"), (("--portable",), "--portable"), (("--unpack",), "--unpack")],
)
def test_what_is_not_for_packages_of_a_language_model(run, option, name):
    status, out, err = run("compile", "quantized", *option)
    assert (status, out) == (2, "") and f"{name} is not for a language model" in err


@pytest.mark.compiled
def test_compile(run, place):
    arguments = ("generate", "quantized", "--prompt", "Hello", "--max-new-tokens", "6")
    text = run(*arguments)[1]
    status, out, _ = run("compile", "quantized")
    assert status == 0 and "32 of 32 tokens are the same" in out
    packages = sorted(file.name.split(".")[0] for file in (place / "quantized").glob("*.aoti.pt2"))
    assert packages == ["prompt", "token"] and run(*arguments)[1] == text


@pytest.mark.compiled
def test_perplexity_says_what_a_program_leaves_out(place, run):
    shutil.copytree(place / "llama", place / "partial")
    file = place / "partial" / "model.safetensors"
    save_file({**load_file(file), "vision_tower.layers.0.mlp.fc1.weight": torch.ones(64)}, file, {"format": "pt"})
    command = ("perplexity", "partial", "--text", "text.txt", "--tokens", "20")
    assert "vision_tower 0%; without vision_tower.layers.0.mlp.fc1.weight" in run(*command)[2]
    for recipes in ((), ("--recipe", "mxint8")):
        status, _, err = run(*command, "--allow-partial", *recipes)
        assert status == 0 and err.count("the program holds") == 1 and "vision_tower 0%" in err


@pytest.mark.usefixtures("loaded_once")
def test_perplexity(run):
    recipes = ("mxint8", "mxfp4_weight_only")
    text = ("--text", "text.txt", "--tokens", "200")
    status, out, err = run("perplexity", "llama", *text, "--recipe", *recipes)
    assert "the program holds" not in err  # all of the checkpoint
    header, *rows, last = (line.split() for line in out.splitlines())
    assert status == 0 and header[:2] == ["model", "perplexity"] and last[:2] == ["199", "tokens,"]
    assert [row[0] for row in rows] == ["float", *recipes] and len(rows[0]) == 2
    assert float(rows[1][2]) < float(rows[2][2]) < 0.1  # KL
    status, out, _ = run("perplexity", "quantized", *text, "--float", "llama")
    assert out.splitlines()[2].split()[1:] == rows[2][1:]
    assert run("perplexity", "quantized", *text)[1].splitlines()[1].split()[1] == rows[2][1]


@pytest.mark.usefixtures("loaded_once")
def test_perplexity_of_a_checkpoint_in_a_narrower_dtype(place, run):
    arguments = ("--text", "text.txt", "--tokens", "50", "--dtype", "bfloat16", "--json")
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "llama", dtype="bfloat16").eval()
    text_blocks = blocks(read_text(place / "text.txt"), load_tokenizer(place / "llama"), 50)
    expected = perplexity(lambda ids: model(input_ids=ids).logits, text_blocks).perplexity
    for folder, *more in (("llama",), ("quantized", "--float", "llama")):
        row = json.loads(run("perplexity", folder, *more, *arguments)[1])["models"][0]
        assert row["model"] == "float" and row["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert "--dtype is for the checkpoint of --float; give it" in run("perplexity", "quantized", *arguments)[2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("generate", "llama", "--prompt", "x"), r"'llama' holds no program\.pt2"),
        (("generate", "quantized", "--prompt", "x", "--max-new-tokens", "0"), "--max-new-tokens 0 must be at least 1"),
        (("generate", "quantized", "--prompt", "x", "--top-k", "3"), "--top-k is for sampling"),
        (("generate", "quantized", "--prompt", "x", "--chat"), "no chat template"),
        (("perplexity", "quantized", "--text", "text.txt", "--recipe", "mxfp8"), "--recipe has no meaning"),
        (("perplexity", "llama", "--text", "none.txt"), "no file or folder 'none.txt'"),
        (("perplexity", "llama", "--text", "text.txt", "--tokens", "1"), "--tokens 1 must be at least 2"),
        ((*QUANTIZE, "hf:llama", "--output", "llama"), "is the folder of the checkpoint"),
        ((*QUANTIZE, "hf:llama", "--output", "text.txt"), "is a file: a language model is written to a folder"),
        ((*QUANTIZE, "hf:llama", "--output", "o", "--compile"), "--compile is for a program"),
        ((*QUANTIZE, "hf:llama", "--output", "o", "--distill", "none.txt"), "no file or folder 'none.txt'"),
        (
            (*QUANTIZE, "hf:llama", "--output", "o", "--distill", "text.txt", "--distill-checkpoint", "text.txt"),
            "checkpoint 'text.txt' cannot be a folder: File exists; name another one",
        ),
        (
            (*QUANTIZE, "hf:llama", "--output", "o", "--distill", "text.txt", "--distill-warmup", "9"),
            "warmup=9 must be less than the number of steps, which is 1",
        ),
        ((*QUANTIZE, "hf:llama", "--output", "o.pt2", "--distill", "text.txt"), "--distill is for a language model"),
        ((*QUANTIZE, "hf:nowhere", "--output", "o"), "no language model"),
    ],
)
def test_errors(run, arguments, text):
    status, _, err = run(*arguments)
    assert status == 2 and re.search(text, err), err


def test_a_model_that_cannot_write(run, monkeypatch):
    """As one that knows fewer positions than a block has tokens."""
    monkeypatch.setattr(language, "generate_lessons", lambda model, texts: [][len(texts)])
    arguments = (*QUANTIZE, "hf:llama", "--output", "o", "--distill", "text.txt", "--distill-generated")
    status, _, err = run(*arguments)
    assert status == 2 and "could not write text to train on: IndexError: list index out of range" in err, err


@pytest.mark.compiled
def test_distill(run, place):
    (place / "long.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    arguments = ("quantize", "--recipe", "mxfp4_weight_only", "--model", "hf:llama")
    assert run(*arguments, "--distill", "long.txt", "--output", "trained")[0] == 0
    trained, nearest = (
        LanguageModel.from_pretrained(place / name).program.state_dict for name in ("trained", "quantized")
    )
    assert trained.keys() == nearest.keys()
    assert not all(torch.equal(tensor, nearest[name]) for name, tensor in trained.items())
    options = f"--distill-epochs 2 --distill-lr 1e-3 --distill-recompute --distill-checkpoint {place}/state".split()
    options.append("--distill-generated")
    for output in ("longer", "again"):  # the second writes the same text, and goes on from the end of the first
        assert run(*arguments, "--distill", "long.txt", *options, "--output", output)[0] == 0
    longer, again = (LanguageModel.from_pretrained(place / name).program.state_dict for name in ("longer", "again"))
    assert all(torch.equal(tensor, again[name]) for name, tensor in longer.items())
    assert not all(torch.equal(tensor, trained[name]) for name, tensor in longer.items())


@pytest.mark.slow
def test_two_ranks_distil(place):
    (place / "long.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    command = "quantize --recipe mxfp4_weight_only --model hf:llama --distill long.txt --distill-generated"
    command += " --distill-lr 1e-3 --output"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pt2mx"]
    here = os.environ | {"TMPDIR": str(place)}  # torchrun leaves a folder
    subprocess.run([*torchrun, *command.split(), "ranks"], cwd=place, env=here, check=True, timeout=600)
    alone = [sys.executable, "-m", "pt2mx", *command.split(), "alone", "--distill-accumulate", "2"]
    subprocess.run(alone, cwd=place, check=True, timeout=600)
    first, second = (LanguageModel.from_pretrained(place / name) for name in ("ranks", "alone"))
    ids = torch.arange(16)[None]
    torch.testing.assert_close(first(ids).logits, second(ids).logits, rtol=0, atol=0.05)


@pytest.mark.compiled
def test_a_checkpoint_without_a_tokenizer(run, place):
    checkpoint("gpt2", place / "gpt2", tokenizer=False, num_hidden_layers=1)
    status, _, err = run(*QUANTIZE, "hf:gpt2", "--output", "tokens")
    assert status == 0 and "holds no tokenizer" in err
    status, _, err = run("generate", "tokens", "--prompt", "x")
    assert status == 2 and "holds no tokenizer" in err


def test_another_kind_of_model(run, place):
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    transformers.BertModel(config).save_pretrained(place / "bert")
    status, _, err = run(*QUANTIZE, "hf:bert", "--output", "o")
    assert status == 2 and "BertLMHeadModel" in err
