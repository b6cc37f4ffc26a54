"""Checkpoints of ModelOpt: one algorithm, or one for each layer."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, convert_checkpoint, save_checkpoint
from pt2mx.pt2e.checkpoints import modelopt_config
from pt2mx.pt2e.checkpoints.configs import read_config, write_config
from pt2mx.pt2e.checkpoints.load import load_checkpoint
from pt2mx.pt2e.models.layouts import LAYOUTS
from pt2mx.pt2e.models.module_schemes import Module, Scheme
from pt2mx.pt2e.models.weight_formats import FP8_BLOCKS, NVFP4, spec_of
from tests.float_checkpoints import float_checkpoint, load_packed_model, tensors
from tests.language_models import transformers

RCEIL8 = spec_of("fp8_e4m3").replace(scale_mode="rceil")
LAYER = "model.layers.0"


def test_modelopt_with_an_algorithm_for_each_layer():
    nv4 = spec_of(NVFP4).replace(scale_mode="nearest")
    modules = {
        "l.q": Module("Linear", Scheme("fp8_e4m3", RCEIL8)),
        "l.o": Module("Linear", Scheme(NVFP4, nv4), pre_scaled=True),
        "l.up": Module("Linear", Scheme(NVFP4)),
        "l.down": Module("Linear", Scheme(FP8_BLOCKS)),
        "l.moe.experts.0.w1": Module("Experts", Scheme(NVFP4)),
        "head": Module("Linear", None),
    }
    config = write_config(LAYOUTS["modelopt"], modules)
    awq = {"quant_algo": "NVFP4_AWQ", "group_size": 16, "has_zero_point": False, "pre_quant_scale": True}
    assert config["quantized_layers"] == {
        "l.q": {"quant_algo": "MXFP8", "group_size": 32}, "l.o": awq,
        "l.up": {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "l.down": {"quant_algo": "FP8_PB_WO"},
        "l.moe.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    }  # fmt: skip
    assert config["config_groups"]["group_2"]["targets"] == ["l.moe.experts", "l.up"]
    file = modelopt_config.file_of(config)
    assert file["quantization"]["quant_algo"] == "MIXED_PRECISION" and "group_size" not in file["quantization"]
    for one in (config, {"quant_method": "modelopt", **file}):
        schemes = read_config(one)
        assert all(schemes.of(name) == module.scheme for name, module in modules.items())
        assert schemes.of("l.moe.experts.3.w2") == Scheme(NVFP4) and schemes.of("l.q_norm") is None
        assert schemes.block == (128, 128)


def _of_modelopt(folder, layers, **fields):
    """Write a float checkpoint whose weights in `layers` have codes; return the values of these weights.

    Args:
        layers: layer -> its algorithm, and the shape of its scales.
    """
    float_checkpoint("llama", folder, shard="1GB")
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    written, values = load_file(path), {}
    for name, (_, shape) in layers.items():
        weight = written[f"{name}.weight"].float()
        scale = torch.rand(shape) / 1000 + 0.001
        grid = scale.reshape(-1, 1) if scale.dim() < 2 else scale.squeeze()[None, None] if scale.numel() == 1 else scale
        codes = (weight / grid).to(torch.float8_e4m3fn)
        values[f"{name}.weight"] = (codes.float() * grid).bfloat16()
        written |= {f"{name}.weight": codes, f"{name}.weight_scale": scale, f"{name}.input_scale": torch.tensor(0.5)}
    save_file(written, path, {"format": "pt"})
    algorithms = {name: {"quant_algo": algorithm} for name, (algorithm, _) in layers.items()}
    quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": algorithms}
    file = {"producer": {"name": "modelopt"}, "quantization": {**quantization, **fields}}
    (folder / "hf_quant_config.json").write_text(json.dumps(file))
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    return values


@torch.no_grad()
def test_fp8_of_a_tensor_its_rows_and_blocks(tmp_path, logits):
    """The grid of scales decides; the inputs of FP8 stay in high precision."""
    layers = {
        f"{LAYER}.self_attn.o_proj": ("FP8", ()),
        f"{LAYER}.mlp.up_proj": ("FP8_PER_CHANNEL_PER_TOKEN", (96,)),
        f"{LAYER}.mlp.down_proj": ("FP8_PB_WO", (1, 1, 1, 1)),
    }
    values = _of_modelopt(tmp_path / "mixed", layers)
    model = load_packed_model(tmp_path / "mixed")
    for name, expected in values.items():
        assert torch.equal(model.get_submodule(name.removesuffix(".weight")).weight, expected)
    plain = float_checkpoint("llama", tmp_path / "plain", shard="1GB")
    save_file(load_file(plain / "model.safetensors") | values, plain / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(model), logits(transformers.AutoModelForCausalLM.from_pretrained(plain)))


@pytest.mark.slow
@torch.no_grad()
def test_a_program_of_several_formats(tmp_path, logits):
    """NVFP4, MXFP8 with inputs, and floats: saved, read, saved again, and converted."""
    source = float_checkpoint("llama", tmp_path / "float", shard="1GB")
    mixed = MXQuantizer().set_module_name_regex(".*mlp.*", MXQuantizationConfig(weight="mxfp4"))
    mixed.set_module_name_regex(
        ".*self_attn.*_proj", MXQuantizationConfig(weight="mxfp8{32}(rceil)", activation="mxfp8{32}(rceil)")
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    program = pt2mx.quantize_language_model(model, mixed)
    save_checkpoint(program, model, tmp_path / "first", "modelopt")
    config = json.loads((tmp_path / "first" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"][f"{LAYER}.mlp.up_proj"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    again = load_checkpoint(tmp_path / "first")
    assert torch.equal(logits(again), logits(program))
    save_checkpoint(again, model, tmp_path / "second", "modelopt")
    convert_checkpoint(tmp_path / "first", tmp_path / "third", layout="modelopt")
    for folder in ("second", "third"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"] == config
        one, other = tensors(tmp_path / "first"), tensors(tmp_path / folder)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    convert_checkpoint(tmp_path / "first", tmp_path / "ct", layout="compressed-tensors", weights=None)
    assert torch.equal(logits(load_packed_model(tmp_path / "ct")), logits(load_packed_model(tmp_path / "first")))


def test_scales_that_fit_no_grid(tmp_path):
    _of_modelopt(tmp_path / "mixed", {f"{LAYER}.mlp.up_proj": ("FP8", ())})
    path = tmp_path / "mixed" / "model.safetensors"
    save_file(load_file(path) | {f"{LAYER}.mlp.up_proj.weight_scale": torch.ones(5)}, path, {"format": "pt"})
    with pytest.raises(MXError, match=r"up_proj.weight has codes of shape .* no block of fp8_e4m3 gives such a grid"):
        load_packed_model(tmp_path / "mixed")
