"""Merged weights: in float, and in new codes with their error."""

import math

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import MXError
from tests.compare import sqnr
from tests.flow import calibrated, convert, exported, reloaded
from tests.models import IDS, Tied
from tests.training_models import random_adapters


def quantized(recipe):
    quantizer = pt2mx.MXQuantizer.from_recipe(recipe)
    return pt2mx.convert_pt2e(calibrated(exported(Tied().eval(), IDS), quantizer, IDS))


def test_float_model():
    lora = random_adapters(pt2mx.add_lora(convert(Tied().eval(), (IDS,), "mxfp4_weight_only"), 4, 8))
    before = lora(IDS)
    model, errors = pt2mx.merge_lora(lora)
    assert sqnr(model(IDS), before) > 100 and torch.equal(lora(IDS), before)
    assert not list(model.named_buffers()) and not any("lora" in name for name, _ in model.named_parameters())
    assert all(min(error) > 100 for error in errors.values()) and set(errors) == {"query", "key", "head"}
    table, head = model.get_parameter("head.weight"), model.get_parameter("head.weight_1")  # no longer tied
    assert not torch.equal(table, head)
    again = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(model, pt2mx.MXQuantizer.from_recipe("mxfp4_weight_only")))
    assert len([*pt2mx.packed_weights(again)]) == 5


@pytest.mark.compiled_cases("mxfp8")
@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp8", "nvfp4"])
def test_new_codes(recipe):
    converted = quantized(recipe)
    lora = random_adapters(pt2mx.add_lora(converted, 4, 8, ["query", "key"]))
    model, errors = pt2mx.merge_lora(lora, requantize=True)
    merged = {weight.name: weight for weight in pt2mx.packed_weights(model)}
    for weight in pt2mx.packed_weights(converted):
        module = weight.name.removesuffix(".weight")
        if module == "up":
            assert torch.equal(merged["up_t"].dequantized().T, weight.dequantized())
        if module not in errors:
            continue
        factors = (lora.get_parameter(f"{module}.lora_{factor}.weight").detach() for factor in "BA")
        update = 2.0 * torch.matmul(*factors)
        exact = weight.dequantized() + update
        assert str(merged[weight.name].spec) == str(weight.spec)
        stored = merged[weight.name].dequantized()
        assert errors[module].sqnr == pytest.approx(sqnr(stored, exact), abs=1e-3)
        noise = (stored - exact).square().sum()
        assert errors[module].of_update == pytest.approx(10 * math.log10(update.square().sum() / noise), abs=1e-3)
    loaded = reloaded(torch.export.export(model, (IDS,))).module()
    assert torch.equal(loaded(IDS), model(IDS))
    assert "quantized" in pt2mx.quantization_report(model).summary


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp6", "nvfp4"])
def test_codes_stay_without_an_update(recipe):
    converted = quantized(recipe)
    model, errors = pt2mx.merge_lora(pt2mx.add_lora(converted), requantize=True)
    assert torch.equal(model(IDS), converted(IDS)) and all(error.sqnr == math.inf for error in errors.values())


def test_weights_that_share_a_tensor_scale_share_the_new_one():
    converted = convert(Tied().eval(), (IDS,), "nvfp4_weight_only")
    shared = {w.name: w.tensor_scale for w in pt2mx.packed_weights(converted)}
    assert torch.equal(shared["query.weight"], shared["key.weight"])
    lora = pt2mx.add_lora(converted, targets=["query"])
    with torch.no_grad():
        lora.get_parameter("query.lora_B.weight").fill_(1.0)
    model, errors = pt2mx.merge_lora(lora, requantize=True)
    weights = {w.name: w for w in pt2mx.packed_weights(model)}
    assert list(errors) == ["query"] and errors["query"].sqnr > 18
    assert torch.equal(weights["query.weight"].tensor_scale, weights["key.weight"].tensor_scale)
    assert weights["query.weight"].tensor_scale > shared["query.weight"]


@pytest.mark.parametrize("recipe", ["mxfp4_weight_only", "mxfp4"])
def test_a_rotated_layer(recipe):
    torch.manual_seed(0)
    x = torch.randn(64, 64) @ torch.randn(64, 64)
    graph = exported(nn.Sequential(nn.Linear(64, 48)).eval(), x)
    quantizer = pt2mx.MXQuantizer.from_recipe(recipe)
    rotated = pt2mx.optimize(graph, quantizer, [(x,)], algorithms=[pt2mx.algorithms.Rotation(32)])
    prepared = pt2mx.prepare_pt2e(rotated, quantizer)
    prepared(x)
    lora = random_adapters(pt2mx.add_lora(pt2mx.convert_pt2e(prepared), targets=["0"]))
    assert "hadamard" in lora.code
    update = 2.0 * (lora.get_parameter("0.lora_B.weight") @ lora.get_parameter("0.lora_A.weight"))
    base = pt2mx.merge_lora(pt2mx.add_lora(pt2mx.convert_pt2e(prepared))).model
    expected = base(x) + x @ update.T  # of the input before it is rotated
    assert sqnr(pt2mx.merge_lora(lora).model(x), expected) > 90


def test_models_without_adapters_are_refused():
    converted = convert(Tied().eval(), (IDS,), "mxfp4")
    for other in (converted, nn.Linear(2, 2), pt2mx.lower_to_inductor(pt2mx.add_lora(converted))):
        with pytest.raises(MXError, match="expected a model with adapters"):
            pt2mx.merge_lora(other)
