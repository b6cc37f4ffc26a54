"""Architectures of torchvision and transformers through the whole flow; `python -m tests.sweep` tabulates them."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.sweep import hugging_face, vision
from tests.sweep.__main__ import main
from tests.sweep.stages import NEEDED, STAGES, Flow
from tests.sweep.table import ARCHITECTURES, COMPILED, RECIPES

README = " ".join((Path(__file__).parent / "README.md").read_text().split())

#: those that `make test` takes
DEFAULT = ("BertForSequenceClassification", "PatchTSMixerModel")
#: with these, a fast one of each kind; all others are slow in sum
FAST = (
    "mobilenet_v3_small",
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "MambaForCausalLM",
    "T5ForConditionalGeneration",
    "Wav2Vec2ConformerModel",
    "VisualBertModel",
)


def run(name, stages):
    flow = Flow(ARCHITECTURES[name], RECIPES[name])
    for stage in stages:
        getattr(flow, stage)()


@pytest.mark.slow_except(*DEFAULT, *FAST)
@pytest.mark.compiled_except(*DEFAULT)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_converts_to_the_bit_reloads_and_skips_nothing_silently(name):
    run(name, STAGES[:-1])


@pytest.mark.slow_except("BertForSequenceClassification")
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.compiled_cases("BertForSequenceClassification")
def test_lowers_to_core_aten(name):
    run(name, (*NEEDED, "core_aten"))


@pytest.mark.slow_except("BertForSequenceClassification")
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.compiled_cases("BertForSequenceClassification")
def test_scaled_matmuls_agree(name):
    run(name, (*NEEDED, "scaled_mm"))


@pytest.mark.slow  # MiniLM is compiled by default, in test_real_models.py
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_agrees(name, compiler):
    run(name, (*NEEDED, "compile"))


def test_the_table_covers_both_libraries_in_every_recipe():
    kinds = Counter(architecture.kind for architecture in ARCHITECTURES.values())
    assert len(vision.ARCHITECTURES) >= 30 and len(hugging_face.ARCHITECTURES) >= 100
    assert len(kinds) >= 9 and min(kinds.values()) >= 4
    assert set(RECIPES.values()) == {"mxfp8", "mxfp4", "mxfp6", "mxint8"}
    assert {ARCHITECTURES[name].kind for name in (*DEFAULT, *FAST)} == kinds.keys()
    assert {RECIPES[name] for name in (*DEFAULT, *FAST)} == set(RECIPES.values())
    assert set(COMPILED) <= set(ARCHITECTURES)
    tally = f"{len(ARCHITECTURES)} architectures, {len(vision.ARCHITECTURES)} of torchvision and"
    assert f"{tally} {len(hugging_face.ARCHITECTURES)} of transformers" in README
    assert f"`make test` takes {len(DEFAULT)} of them, and with `make test-compiled` it is one of each kind." in README
    assert f"compiles {len(COMPILED)}, with `COMPILE=all` every one" in README


def test_the_table_has_its_commit_and_the_causes_of_failures(tmp_path, capsys, monkeypatch):
    file = tmp_path / "results.md"
    assert main(["BitModel", "--compile", "none", "--output", str(file)]) == 0
    told = file.read_text()
    assert told == capsys.readouterr().out
    assert re.match(r"At commit [0-9a-f]{40}(, with uncommitted changes)?\.\n|At commit unknown: ", told)
    assert "| BitModel | vision | mxint8 | ok | ok | ok | ok | ok | ok |  | 9 | 0 |" in told
    assert "1 of 1 architectures go through all stages (`--compile none`)." in told
    monkeypatch.setattr(Flow, "convert", lambda flow: 1 / 0)
    assert main(["BitModel", "--compile", "none"]) == 1
    told = capsys.readouterr().out
    assert "0 of 1 architectures" in told and told.endswith(
        "\n- BitModel, convert: ZeroDivisionError: division by zero\n"
    )
