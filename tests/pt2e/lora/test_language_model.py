"""Adapters of a tiny Llama: trained on its program, generated with, saved."""

import json

import pytest
import torch
from torch import nn

import pt2mx
from pt2mx import LanguageModel, MXError, MXQuantizer
from pt2mx.pt2e.lora.adapters import adapters_of
from tests.compare import sqnr
from tests.language_models import decoder_by_recipe, quantized_decoder, tiny_decoder
from tests.training_models import random_adapters

TOKENS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return decoder_by_recipe("mxfp4_weight_only", "llama")


def loss_of(graph, model):
    logits = graph(**model.training_inputs(TOKENS))
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


@pytest.mark.compiled
def test_trained_saved_and_loaded(model, tmp_path):
    lora = pt2mx.add_lora(model.program, 4, 8, ["q_proj", "v_proj", "down_proj", "lm_head"])
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], 3e-2)
    losses = []
    for _ in range(20):
        loss = loss_of(lora, model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    model.with_graph(lora).save_pretrained(tmp_path)
    loaded = LanguageModel.from_pretrained(tmp_path)
    graph = loaded.program.module(check_guards=False)
    inputs = model.training_inputs
    assert torch.equal(graph(**inputs(TOKENS)), lora(**inputs(TOKENS)))  # the file is the trained model, to the bit
    assert sqnr(loaded(TOKENS).logits, lora(**inputs(TOKENS))) > 90
    assert loaded.generate(TOKENS[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 7)
    assert adapters_of(graph).keys() == adapters_of(lora).keys()


@pytest.mark.compiled
def test_files_have_the_names_of_transformers(model, tmp_path):
    lora = random_adapters(pt2mx.add_lora(model.program, 4, 8, ["v_proj"]))
    pt2mx.save_lora(lora, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    names = {name for name, module in tiny_decoder("llama").named_modules() if name.endswith("v_proj")}
    assert set(config["target_modules"]) == names and config["task_type"] == "CAUSAL_LM"
    loaded = pt2mx.load_lora(model.program, tmp_path)
    inputs = model.training_inputs
    assert torch.equal(loaded(**inputs(TOKENS)), lora(**inputs(TOKENS)))


@pytest.mark.slow
@pytest.mark.parametrize("requantize", [False, True])
def test_merged(model, requantize):
    lora = random_adapters(pt2mx.add_lora(model.program, 4, 8))
    merged = pt2mx.merge_lora(lora, requantize)
    expected = lora(**model.training_inputs(TOKENS))
    assert sqnr(model.with_graph(merged.model)(TOKENS).logits, expected) > (10 if requantize else 90)


@pytest.mark.slow
def test_experts_stay_packed():
    quantizer = MXQuantizer.from_recipe("mxfp4_weight_only")
    model = quantized_decoder("qwen3_moe", quantizer, dtype="bfloat16")
    lora = random_adapters(pt2mx.add_lora(model.program, 4, 8, "all-linear"))
    assert "grouped_linear_mx" in lora.code and not any("gate." in module for module in adapters_of(lora))
    loss_of(lora, model).backward()
    assert all(p.grad.any() for name, p in lora.named_parameters() if "lora_B" in name)
    unchanged = pt2mx.merge_lora(pt2mx.add_lora(model.program), requantize=True).model
    inputs = model.training_inputs
    converted = model.program.module(check_guards=False)
    assert torch.equal(unchanged(**inputs(TOKENS)), converted(**inputs(TOKENS)))


@pytest.mark.slow
def test_a_quantized_cache_is_refused():
    model = quantized_decoder("llama", MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache("mxfp8"))
    with pytest.raises(MXError, match="codes that the program stores, as a quantized cache does"):
        pt2mx.add_lora(model.program)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_reads_the_files(model, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    lora = random_adapters(pt2mx.add_lora(model.program, 4, 8))
    pt2mx.save_lora(lora, tmp_path)
    eager = tiny_decoder("llama")
    with torch.no_grad():
        for weight in pt2mx.packed_weights(model.program):
            eager.get_parameter(weight.name.removeprefix("model.")).copy_(weight.dequantized())
    adapted = peft.PeftModel.from_pretrained(eager, tmp_path)
    expected = adapted(input_ids=TOKENS).logits
    assert sqnr(lora(**model.training_inputs(TOKENS)), expected) > 90
