"""Architectures of torchvision and transformers through the whole flow; `python -m tests.sweep` tabulates them."""

import pytest

from tests.sweep.stages import STAGES, Flow
from tests.sweep.table import ARCHITECTURES, RECIPES

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
COMPILED_BY_DEFAULT = ("LlamaForCausalLM",)


def sweep(default):
    return [pytest.param(n, marks=() if n in default else pytest.mark.slow) for n in ARCHITECTURES]


def run(name, stages):
    flow = Flow(ARCHITECTURES[name], RECIPES[name])
    for stage in stages:
        getattr(flow, stage)()


@pytest.mark.parametrize("name", sweep(DEFAULT))
def test_converts_to_the_bit_reloads_and_skips_nothing_silently(name):
    run(name, [stage for stage in STAGES if stage != "compile"])


@pytest.mark.parametrize("name", sweep(COMPILED_BY_DEFAULT))
def test_compiled_agrees(name, compiler):
    run(name, ["export", "prepare", "convert", "equal", "compile"])


def test_the_table_covers_the_libraries():
    kinds = [architecture.kind for architecture in ARCHITECTURES.values()]
    vision = [name for name in ARCHITECTURES if name.islower() or "_" in name]
    assert len(vision) >= 30 and len(ARCHITECTURES) - len(vision) >= 40
    assert set(RECIPES.values()) == {"mxfp8", "mxfp4", "mxfp6", "mxint8"} and len(set(kinds)) >= 8
