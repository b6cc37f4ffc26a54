"""The command `pt2mx card`, and the cards of folders that other commands write."""

import json
import os
import re
import shlex
import shutil
import stat

import pytest

from pt2mx import LanguageModel, MXQuantizer, slice_language_model
from pt2mx.pt2e.cli.card import command_line
from pt2mx.pt2e.cli.command import command_parser, main
from pt2mx.pt2e.files.card_metadata import metadata_of
from tests.language_models import checkpoint

BASE = "---\nlicense: apache-2.0\n---\n# Base\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a checkpoint, "base"; what `pt2mx quantize` makes of it, "quantized", `slice` of that, "narrow",
    and `save-checkpoint`, "saved"."""
    path = tmp_path_factory.mktemp("card")
    checkpoint("llama", path / "base", num_hidden_layers=1, dtype="bfloat16")
    (path / "base" / "README.md").write_text(BASE)
    (path / "base" / "LICENSE").write_text("terms")
    model, output = f"hf:{path}/base", str(path / "quantized")
    assert main(["quantize", "--model", model, "--recipe", "mxint8", "--calibration", "none", "--output", output]) == 0
    assert main(["slice", output, "--recipe", "mxfp4_weight_only", "--output", str(path / "narrow")]) == 0
    save = ["save-checkpoint", str(path / "narrow"), "--float", str(path / "base"), "--output", str(path / "saved")]
    assert main([*save, "--unpack", ".*embed_tokens", "--layout", "compressed-tensors"]) == 0
    return path


COMMANDS = [
    "pt2mx quantize --model hf:base --recipe mxint8 --calibration none --output quantized",
    "pt2mx slice quantized --recipe mxfp4_weight_only --output narrow",
    "pt2mx save-checkpoint narrow --float base --output saved --layout compressed-tensors --unpack '.*embed_tokens'",
]


@pytest.mark.parametrize(
    ("name", "commands", "form"), [("quantized", 1, "mxint8"), ("narrow", 2, "mxfp4"), ("saved", 3, "mxfp4")]
)
@pytest.mark.compiled_cases("quantized-1-mxint8")
def test_each_folder_has_a_card(place, name, commands, form):
    metadata = metadata_of(place / name)
    assert metadata["pt2mx"]["commands"] == COMMANDS[:commands] and metadata["pt2mx"]["base"] == "base"
    assert metadata["license"] == "apache-2.0" and form in metadata["tags"] and "base_model" not in metadata
    text = (place / name / "README.md").read_text()
    assert f"# {name}\n" in text and "9 of 10 operators are quantized." in text and str(place) not in text
    assert (place / name / "LICENSE").read_text() == "terms"
    report = json.loads((place / name / "report.json").read_text())
    assert (f"| {report['bytes_after']:,} |" in text) == (name != "saved")
    before = os.umask(0o022)
    os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in (place / name).iterdir()} == {0o666 & ~before}


def test_a_slice_in_python_takes_over_no_figures(place, tmp_path):
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only")
    slice_language_model(LanguageModel.from_pretrained(place / "quantized"), quantizer).save_pretrained(tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert "LICENSE" in names and not names & {"report.json", "recipe.yaml"}
    assert metadata_of(tmp_path)["pt2mx"]["commands"] == COMMANDS[:1]


@pytest.mark.compiled
def test_the_codes_of_a_checkpoint_come_back_with_their_recipe(run, place):
    assert run("quantize", "--model", "hf:saved", "--output", "again")[0] == 0
    assert (place / "again" / "recipe.yaml").read_text() == (place / "narrow" / "recipe.yaml").read_text()
    commands = metadata_of(place / "again")["pt2mx"]["commands"]
    assert commands == [*COMMANDS, "pt2mx quantize --model hf:saved --output again"]


def test_what_is_known_of_engines(place):
    engines = metadata_of(place / "saved")["pt2mx"]["engines"]
    assert [text.split(" (")[0] for text in engines.values()] == ["loads it", "loads it"]
    assert "vllm serve saved\n" in (place / "saved" / "README.md").read_text()


def test_it_prints_the_card_of_the_folder(run, place):
    for name in ("quantized", "saved"):
        assert run("card", name) == (0, (place / name / "README.md").read_text(), "")


def test_names_for_the_hub(run):
    status, out, _ = run("card", "quantized", "--base-model", "org/Base", "--license", "mit", "--json")
    text = json.loads(out)["card"]
    assert status == 0 and text.startswith("---\nlicense: mit\nbase_model: org/Base\nbase_model_relation: quantized\n")
    assert "[org/Base](https://huggingface.co/org/Base) with weights in MXINT8" in text


@pytest.mark.parametrize("words", [("--name", "a b/c"), ("--base-model", "/home/me/base"), ("--base-model", "")])
def test_what_is_no_name_of_the_hub(run, words):
    status, out, err = run("card", "quantized", *words)
    assert (status, out) == (2, "") and f"{words[0]} {words[1]!r} is no name of the Hub: give owner/name" in err


def test_the_name_of_the_repository_stays(run, place):
    assert run("card", "saved", "--name", "me/tiny", "--output", "saved/README.md")[0] == 0
    _, text, _ = run("card", "saved")
    assert text == (place / "saved" / "README.md").read_text() and "# me/tiny\n" in text
    assert "hf download me/tiny --local-dir tiny\n" in text and "vllm serve me/tiny\n" in text


def test_measured_figures_are_added(run, place, tmp_path):
    """They stay in the card, and a new figure takes the place of an old one."""
    (place / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 10)
    _, printed, _ = run("perplexity", "narrow", "--float", "base", "--text", "book.txt", "--json")
    (tmp_path / "perplexity.json").write_text(printed)
    tasks = {"arc_easy": {"alias": "arc_easy", "acc,none": 0.5625, "acc_stderr,none": 0.01, "sample_len": 5}}
    (tmp_path / "eval.json").write_text(json.dumps({"results": tasks, "n-shot": {"arc_easy": 2}}))
    files = [str(tmp_path / name) for name in ("perplexity.json", "eval.json")]
    for _ in range(2):
        assert run("card", "narrow", "--measured", *files, "--output", "narrow/README.md")[0] == 0
    text = (place / "narrow" / "README.md").read_text()
    of_float, quantized = json.loads(printed)["models"]
    rows = text.split("## Measured")[1].split("##")[0].strip().splitlines()[2:]
    on = f"book.txt, {json.loads(printed)['tokens']} tokens"
    assert rows == [
        f"| perplexity | {on} | {of_float['perplexity']:.4g} | {quantized['perplexity']:.4g} |",
        f"| KL divergence from the float model, nats | {on} |  | {quantized['divergence']:.4g} |",
        f"| share of tokens with the same most likely next one | {on} |  | {quantized['agreement']:.4g} |",
        "| acc | arc_easy, 2-shot |  | 0.5625 |",
    ]
    assert run("card", "narrow") == (0, text, "")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", r"cannot read '.*m\.json': Expecting property name"),
        ("{}", r"'.*m\.json' is not what `pt2mx perplexity --json` printed, or `pt2mx eval --output` wrote: KeyError"),
        ('{"models": [{"model": "float"}]}', "a card is of one quantized model, and the file has none"),
        ('{"models": [{"model": "a"}, {"model": "b"}]}', "a card is of one quantized model, and the file has a, b"),
        ('{"results": {"a": 1}}', r"'.*m\.json' is not what `pt2mx perplexity --json` printed"),
    ],
)
def test_other_files_are_refused(run, tmp_path, content, fault):
    (tmp_path / "m.json").write_text(content)
    status, out, err = run("card", "quantized", "--measured", str(tmp_path / "m.json"))
    assert (status, out) == (2, "") and re.search(fault, err)


def test_figures_that_were_changed_to_others(run, place, tmp_path):
    (tmp_path / "m.json").write_text('{"results": {}}')
    shutil.copytree(place / "narrow", tmp_path / "changed")
    for figures in ("5", "[5]", "[{}]"):
        (tmp_path / "changed/README.md").write_text(f"---\npt2mx: {{measured: {figures}}}\n---\n")
        status, _, err = run("card", str(tmp_path / "changed"), "--measured", str(tmp_path / "m.json"))
        assert status == 2 and "figures in the metadata of README.md are not those that pt2mx writes" in err


def test_a_command_is_told_without_places():
    line = "save-checkpoint q --float /home/me/base --output /tmp/out --import /a/x.py --import 'b c.py' --unpack a b"
    assert command_line(command_parser().parse_args(shlex.split(line))) == (
        "pt2mx save-checkpoint q --import x.py --import 'b c.py' --float base --output out --unpack a b"
    )
