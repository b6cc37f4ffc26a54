"""Which layers targets name, and what errors say of other targets and arguments."""

import re

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError, MXQuantizer
from pt2mx.pt2e.lora.adapters import adapters_of
from tests.flow import convert, exported, reloaded
from tests.models import module_of

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def block():
    layers = {"q_proj": nn.Linear(64, 64), "o_proj": nn.Linear(64, 64), "norm": nn.LayerNorm(64)}
    return module_of(lambda self, x: self.norm(x + self.o_proj(torch.relu(self.q_proj(x)))), **layers)


@pytest.fixture(scope="module")
def converted():
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), nn.Linear(64, 8)).eval()
    return convert(model, (X,), MXQuantizer.from_recipe("mxfp4_weight_only").set_module_name("2", None))


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        ("all-linear", ["0.q_proj", "0.o_proj", "1.q_proj", "1.o_proj"]),
        (["q_proj"], ["0.q_proj", "1.q_proj"]),
        (["1.o_proj", "q_proj", "1.q_proj"], ["0.q_proj", "1.q_proj", "1.o_proj"]),
        (r"1\..*", ["1.q_proj", "1.o_proj"]),
        (("0.o_proj",), ["0.o_proj"]),
    ],
)
def test_targets(converted, targets, modules):
    assert list(adapters_of(pt2mx.add_lora(converted, 2, targets=targets))) == modules


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank=0 must be an integer of at least 1"),
        ({"rank": 2.0}, "rank=2.0 must be an integer"),
        ({"alpha": 0}, "alpha=0 must be a finite number above 0"),
        ({"alpha": float("nan")}, "alpha=nan must be"),
        ({"targets": ["p_proj"]}, "'p_proj' matches no module; the nearest linear layers are .*q_proj"),
        ({"targets": "q_proj"}, "'q_proj' matches no module; the nearest"),  # the whole name of a module
        ({"targets": ["2"]}, "'2': 2 has float weights, or is in a subgraph"),
        ({"targets": ".*"}, "'.*': 2 has float weights"),
        ({"targets": ["norm"]}, r"'norm' is no linear layer, but '0.norm' \(LayerNorm\), '1.norm'"),
        ({"targets": ["0"]}, r"'0' is no linear layer, but '0' \(Model\)"),
        ({"targets": "("}, r"'\(' is no regular expression"),
        ({"targets": []}, r"targets=\[\] must be 'all-linear', a regular expression, or a list"),
        ({"targets": None}, "targets=None must be"),
        ({"targets": [3]}, r"targets=\[3\] must be"),
    ],
)
def test_bad_arguments(converted, arguments, message):
    with pytest.raises(MXError, match=message):
        pt2mx.add_lora(converted, **arguments)


def test_a_second_call_adds_to_other_layers(converted):
    first = pt2mx.add_lora(converted, 2, 4, ["q_proj"])
    second = pt2mx.add_lora(first, 3, 3, ["1.o_proj"])
    assert {m: (a.rank, a.scaling) for m, a in adapters_of(second).items()} == {
        "0.q_proj": (2, 2.0),
        "1.q_proj": (2, 2.0),
        "1.o_proj": (3, 1.0),
    }
    assert sum(p.requires_grad for p in second.parameters()) == 6 and list(adapters_of(first)) == [
        "0.q_proj",
        "1.q_proj",
    ]
    with torch.no_grad():
        second.get_parameter("0.q_proj.lora_A.weight").zero_()
    assert first.get_parameter("0.q_proj.lora_A.weight").any()
    with pytest.raises(MXError, match=r"'0\.q_proj' has an adapter"):
        pt2mx.add_lora(first, targets=["q_proj"])


def test_an_exported_program_is_taken(converted):
    lora = pt2mx.add_lora(reloaded(torch.export.export(converted, (X,))), 2, targets=["q_proj"])
    assert list(adapters_of(lora)) == ["0.q_proj", "1.q_proj"]


def test_other_models_are_refused(converted):
    model = exported(nn.Sequential(nn.Linear(64, 8)).eval(), X)
    prepared = pt2mx.prepare_pt2e(model, MXQuantizer.from_recipe("mxfp4"))
    for other, message in (
        (nn.Linear(64, 8), "expected a converted graph module"),
        (model, "without quantized tensors"),
        (prepared, "prepared model"),
        (pt2mx.lower_to_inductor(converted), "not a lowered one"),
        (convert(nn.Sequential(nn.Conv1d(4, 4, 3)).eval(), (torch.ones(1, 4, 8),)), "has no linear layer"),
    ):
        with pytest.raises(MXError, match=re.escape(message)):
            pt2mx.add_lora(other)
