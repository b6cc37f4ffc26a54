"""The files of peft: names, values and settings, out and in."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.lora.adapters import adapters_of
from tests.compare import sqnr
from tests.flow import convert
from tests.models import IDS, Tied
from tests.training_models import random_adapters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def converted():
    return convert(Tied().eval(), (IDS,), "mxfp4_weight_only")


@pytest.fixture
def lora(converted):
    return random_adapters(pt2mx.add_lora(pt2mx.add_lora(converted, 4, 6, ["query", "key"]), 2, 8, ["head"]))


def change(folder, **settings):
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | settings))


def test_names_values_and_settings(lora, tmp_path):
    pt2mx.save_lora(lora, tmp_path / "new", base_model="owner/model")
    tensors, config = load_file(tmp_path / "new" / WEIGHTS), json.loads((tmp_path / "new" / CONFIG).read_text())
    names = [name for name, _ in lora.named_parameters() if "lora" in name]
    assert set(tensors) == {f"base_model.model.{name}" for name in names}
    assert all(torch.equal(tensors[f"base_model.model.{name}"], lora.get_parameter(name)) for name in names)
    assert config["peft_type"] == "LORA" and config["target_modules"] == ["head", "key", "query"]
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 6.0, "owner/model")
    assert config["rank_pattern"] == {"head": 2} and config["alpha_pattern"] == {"head": 8.0}


def test_loaded_adapters_give_the_same_bits(lora, converted, tmp_path):
    pt2mx.save_lora(torch.export.export(lora, (IDS,)), tmp_path)
    loaded = pt2mx.load_lora(converted, tmp_path)
    assert torch.equal(loaded(IDS), lora(IDS))
    assert all(p.requires_grad == ("lora" in name) for name, p in loaded.named_parameters())


def test_names_may_be_the_ends_of_names(converted, tmp_path):
    torch.manual_seed(0)
    inner = convert(nn.Sequential(Tied()).eval(), (IDS,), "mxfp4_weight_only")
    pt2mx.save_lora(random_adapters(pt2mx.add_lora(converted)), tmp_path)
    assert list(adapters_of(pt2mx.load_lora(inner, tmp_path))) == ["0.query", "0.key", "0.head"]


def test_the_model_may_be_one_layer(tmp_path):
    x = torch.randn(4, 64)
    converted = convert(nn.Linear(64, 8).eval(), (x,), "mxfp4_weight_only")
    lora = random_adapters(pt2mx.add_lora(converted))
    pt2mx.save_lora(lora, tmp_path)
    assert torch.equal(pt2mx.load_lora(converted, tmp_path)(x), lora(x))


def test_rank_stabilized_scaling(lora, converted, tmp_path):
    pt2mx.save_lora(lora, tmp_path)
    change(tmp_path, use_rslora=True)
    scalings = {module: a.scaling for module, a in adapters_of(pt2mx.load_lora(converted, tmp_path)).items()}
    assert scalings == pytest.approx({"query": 3.0, "key": 3.0, "head": 8 / 2**0.5})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "pt2mx reads no adapters with use_dora=True"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA'"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["head"]}, "modules_to_save"),
    ],
)
def test_other_adapters_are_refused(settings, message, lora, converted, tmp_path):
    pt2mx.save_lora(lora, tmp_path)
    change(tmp_path, **settings)
    with pytest.raises(MXError, match=message):
        pt2mx.load_lora(converted, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query.lora_B.weight", torch.ones(64, 3), r"factors of \(4, 64\) and \(64, 3\), not \(rank, 64\)"),
        ("query.lora_B.weight", None, r"factors of \(4, 64\) and \(0,\)"),
        ("other.lora_A.weight", torch.ones(4, 64), "'other', which is the end of 0 names"),
        ("query.lora_magnitude_vector", torch.ones(64), "lora_magnitude_vector"),
    ],
)
def test_files_that_do_not_fit(name, value, message, lora, converted, tmp_path):
    pt2mx.save_lora(lora, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS) | ({} if value is None else {f"base_model.model.{name}": value})
    if value is None:
        del tensors[f"base_model.model.{name}"]
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(MXError, match=message):
        pt2mx.load_lora(converted, tmp_path)


def test_missing_and_damaged_files(lora, converted, tmp_path):
    with pytest.raises(MXError, match=f"has no {CONFIG}"):
        pt2mx.load_lora(converted, tmp_path)
    pt2mx.save_lora(lora, tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(MXError, match="could not read"):
        pt2mx.load_lora(converted, tmp_path)
    with pytest.raises(MXError, match="expected a model with adapters"):
        pt2mx.save_lora(converted, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(MXError, match="could not write"):
        pt2mx.save_lora(lora, tmp_path / "file")


@pytest.mark.slow
def test_peft_computes_the_same(converted, lora, tmp_path):
    """peft reads the files beside a float model with the values of the codes; pt2mx reads what peft writes."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    pt2mx.save_lora(lora, tmp_path)
    model = Tied().eval()
    with torch.no_grad():
        for weight in pt2mx.packed_weights(converted):
            model.get_parameter(weight.name).copy_(weight.dequantized())
    adapted = peft.PeftModel.from_pretrained(model, tmp_path)
    assert sqnr(lora(IDS), adapted(IDS)) > 100
    with torch.no_grad():
        adapted.base_model.model.query.lora_B["default"].weight.mul_(2)
    adapted.save_pretrained(tmp_path / "peft")
    assert sqnr(pt2mx.load_lora(converted, tmp_path / "peft")(IDS), adapted(IDS)) > 100
