"""Checkpoints of architectures that come in MX formats: DeepSeek-V4, Kimi, MiniMax-M3."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pt2mx import MXQuantizationConfig, MXQuantizer, convert_checkpoint
from pt2mx.pt2e.checkpoints import conversion_plan
from pt2mx.pt2e.models.weight_formats import spec_of
from tests.float_checkpoints import load_packed_model, tensors
from tests.language_models import transformers

SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": 0, "num_experts_per_tok": 2}  # fmt: skip
LAYERS = {"mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4}
EXPERTS = MXQuantizationConfig(weight="mxfp4{32}(even,even)")


def write_float(config, folder, kind="AutoModelForCausalLM"):
    torch.manual_seed(0)
    kind = getattr(transformers, kind)
    model = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    model.bfloat16().save_pretrained(folder)
    return folder


def quantizer():
    return MXQuantizer().set_module_name_regex(r".*\.experts.*", EXPERTS)


@torch.no_grad()
def test_kimi(tmp_path, logits):
    """MXFP4 of compressed-tensors, of experts alone, as in Kimi K3. (With the convolutions of linear attention,
    transformers 5.24 loads no checkpoint of compressed-tensors.)"""
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
             "linear_head_dim": 16, "linear_num_heads": 4}  # fmt: skip
    sizes["layer_types"] = ["full_attention", "full_attention"]
    source = write_float(transformers.KimiLinearConfig(**SIZES, **LAYERS, **sizes), tmp_path / "float")
    report = convert_checkpoint(source, tmp_path / "kimi", quantizer())
    assert sorted(report.quantized)[0] == "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    loaded, stock = (
        load_packed_model(tmp_path / "kimi"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "kimi"),
    )
    for name in ("gate_up_proj", "down_proj"):
        of = "model.layers.1.mlp.experts"
        assert torch.equal(getattr(loaded.get_submodule(of), name), getattr(stock.get_submodule(of), name))
    assert torch.equal(logits(loaded), logits(stock))
    convert_checkpoint(tmp_path / "kimi", tmp_path / "nv", layout="modelopt")
    assert torch.equal(logits(load_packed_model(tmp_path / "nv")), logits(stock))


def test_minimax(tmp_path):
    """The vision-language checkpoint of MiniMax-M3, with MXFP4 experts."""
    sizes = {"head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 64, "shared_intermediate_size": 64,
             "layer_types": ["full_attention"] * 2}  # fmt: skip
    text = {**SIZES, **LAYERS, **sizes}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MiniMaxM3VLConfig(
        text_config=text, vision_config=vision, image_token_index=5, video_token_index=6
    )
    source = write_float(config, tmp_path / "float", "MiniMaxM3SparseForConditionalGeneration")
    report = convert_checkpoint(source, tmp_path / "mx", quantizer())
    name = sorted(report.quantized)[0]
    assert name == "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight" and len(report.quantized) == 12
    convert_checkpoint(tmp_path / "mx", tmp_path / "nv", layout="modelopt")
    first, second = tensors(tmp_path / "mx"), tensors(tmp_path / "nv")
    assert torch.equal(first[f"{name}_packed"], second[name]) and second[f"{name}_scale_2"].shape == ()


@pytest.mark.compiled_except("True")
@pytest.mark.parametrize("own_names", [False, True])
def test_deepseek_v4(tmp_path, monkeypatch, own_names):
    """One file has experts in FP4 with blocks of [1, 32] and layers in FP8 with blocks of [128, 128].

    DeepSeek's own files call scales `.scale`, and have no prefix."""
    select = conversion_plan.select_weights

    def chosen(model, quantizer):
        selection = select(model, quantizer)
        forms = {name: "fp4_e2m1" if ".experts." in name else "fp8_e4m3{128x128}" for name in selection.chosen}
        specs = {name: dataclasses.replace(one, weight=spec_of(forms[name])) for name, one in selection.chosen.items()}
        return dataclasses.replace(selection, chosen=specs)

    monkeypatch.setattr(conversion_plan, "select_weights", chosen)
    sizes = {
        **SIZES,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "num_key_value_heads": 1,
    }
    config = transformers.DeepseekV4Config(**sizes, n_routed_experts=4, head_dim=64, q_lora_rank=128)
    source = write_float(config, tmp_path / "float")
    recipe = MXQuantizer().set_global(EXPERTS).set_module_name_regex(".*(head|indexer|compressor).*", None)
    convert_checkpoint(source, tmp_path / "v4", recipe, layout="fp8")
    written, config = tensors(tmp_path / "v4"), json.loads((tmp_path / "v4" / "config.json").read_text())
    assert config["expert_dtype"] == "fp4"
    assert config["quantization_config"]["scale_fmt"] == "ue8m0"
    expert, layer = "model.layers.0.ffn.experts.0.w1.weight", "model.layers.0.attn.wq_b.weight"
    assert (written[expert].dtype, written[f"{expert}_scale_inv"].shape) == (torch.int8, (128, 4))
    assert (written[layer].dtype, written[f"{layer}_scale_inv"].shape) == (torch.float8_e4m3fn, (2, 1))
    if own_names:
        path = tmp_path / "v4" / "model.safetensors"
        held = {name.replace("weight_scale_inv", "scale"): tensor for name, tensor in load_file(path).items()}
        save_file({name.removeprefix("model."): tensor for name, tensor in held.items()}, path, {"format": "pt"})
    loaded, stock = (
        load_packed_model(tmp_path / "v4"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "v4"),
    )
    for name, value in stock.named_parameters():
        module, _, attribute = name.rpartition(".")
        assert torch.equal(getattr(loaded.get_submodule(module), attribute), value), name
