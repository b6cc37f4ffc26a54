"""Architectures of torchvision and transformers through the whole flow; `python -m tests.sweep` tabulates them."""

from collections import Counter
from pathlib import Path

import pytest

from tests.sweep import hugging_face, vision
from tests.sweep.stages import NEEDED, STAGES, Flow
from tests.sweep.table import ARCHITECTURES, COMPILED, RECIPES

README = " ".join((Path(__file__).parent / "README.md").read_text().split())

#: the kinds at their fastest; all others are slow in sum
DEFAULT = (
    "mobilenet_v3_small",
    "vit",
    "BertForSequenceClassification",
    "LlamaForCausalLM",
    "T5ForConditionalGeneration",
    "MambaForCausalLM",
    "Wav2Vec2ForCTC",
)


def run(name, stages):
    flow = Flow(ARCHITECTURES[name], RECIPES[name])
    for stage in stages:
        getattr(flow, stage)()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_converts_to_the_bit_reloads_and_skips_nothing_silently(name):
    run(name, STAGES[:-1])


@pytest.mark.slow  # MiniLM is compiled by default, in test_real_models.py
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_agrees(name, compiler):
    run(name, (*NEEDED, "compile"))


def test_the_table_covers_both_libraries_in_every_recipe():
    kinds = Counter(architecture.kind for architecture in ARCHITECTURES.values())
    assert len(vision.ARCHITECTURES) >= 30 and len(hugging_face.ARCHITECTURES) >= 100
    assert len(kinds) >= 9 and min(kinds.values()) >= 4
    assert set(RECIPES.values()) == {"mxfp8", "mxfp4", "mxfp6", "mxint8"}
    assert set(COMPILED) <= set(ARCHITECTURES)
    tally = f"{len(ARCHITECTURES)} architectures, {len(vision.ARCHITECTURES)} of torchvision and"
    assert f"{tally} {len(hugging_face.ARCHITECTURES)} of transformers" in README
    assert f"compiles {len(COMPILED)}, with `--compile all`" in README
