import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import pt2mx
from pt2mx import MXError, convert_checkpoint
from pt2mx.pt2e.checkpoints.configs import read_config
from pt2mx.pt2e.models.module_schemes import Scheme
from pt2mx.pt2e.models.weight_formats import NVFP4_DIVISOR, spec_of
from tests.float_checkpoints import float_checkpoint, load_packed_model, of_weights

_PACKING = "auto_round:llm_compressor"
MX4 = {"quant_method": "auto-round", "packing_format": _PACKING, "bits": 4, "data_type": "mx_fp", "group_size": 32,
       "act_bits": 4, "act_data_type": "mx_fp", "act_group_size": 32, "act_dynamic": True}  # fmt: skip
LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture
def rewritten(tmp_path):
    """Make an MXFP4 checkpoint, with its tensors and its configuration changed."""

    def make(change, config):
        float_checkpoint("llama", tmp_path / "float", shard="1GB")
        convert_checkpoint(tmp_path / "float", tmp_path / "mx", of_weights("mxfp4"))
        path, fields = tmp_path / "mx" / "model.safetensors", json.loads((tmp_path / "mx" / "config.json").read_text())
        original, tensors = load_packed_model(tmp_path / "mx"), load_file(path)
        save_file(change(tensors), path, {"format": "pt"})
        (tmp_path / "mx" / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
        return original, tmp_path / "mx"

    return make


def test_auto_round(rewritten, logits):
    original, folder = rewritten(lambda tensors: tensors, {**MX4, "act_bits": 16})
    assert torch.equal(logits(load_packed_model(folder)), logits(original))


def test_schemes_of_auto_round():
    extra = {"lm_head": {"bits": 16}, r".*\.down_proj": {"bits": 8, "data_type": "mx_fp8", "act_bits": 16}}
    schemes = read_config({**MX4, "extra_config": extra})
    assert schemes.layout.name == "compressed-tensors" and schemes.of("lm_head") is None
    assert schemes.of("layers.0.up_proj") == Scheme("fp4_e2m1", pt2mx.MXSpec("fp4_e2m1", scale_mode="even"))
    assert schemes.of("layers.0.down_proj") == Scheme("fp8_e4m3")
    nv = {"data_type": "nv_fp", "group_size": 16, "act_data_type": "nv_fp4_with_static_gs", "act_group_size": 16}
    inputs = spec_of(NVFP4_DIVISOR).replace(scale_mode="nearest_flush")
    assert read_config({**MX4, **nv}).of("a") == Scheme(NVFP4_DIVISOR, inputs)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**MX4, "packing_format": "auto_round:auto_gptq"}, "packing_format 'auto_round:auto_gptq' of the checkpoint"),
        ({**MX4, "data_type": "int"}, "the checkpoint has data_type 'int' of 4 bits in groups of 32: expected"),
        ({**MX4, "act_bits": 8, "act_group_size": 128}, "the checkpoint has act_data_type 'mx_fp' of 8 bits"),
        ({**MX4, "act_dynamic": False}, "the checkpoint has static scales of inputs"),
        ({"quant_method": "fp_quant", "forward_dtype": "int4"}, "forward_dtype 'int4'"),
        ({"quant_method": "fp_quant", "forward_dtype": "mxfp4", "pseudoquantization": True}, "pseudoquantization"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' of the checkpoint"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128] of the checkpoint"),
    ],
)  # fmt: skip
def test_what_is_not_read(config, text):
    with pytest.raises(MXError, match=re.escape(text)):
        read_config(config)


FP_QUANT = {"quant_method": "fp_quant", "forward_dtype": "mxfp4", "modules_to_not_convert": ["lm_head"]}
ROTATION = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
for _ in range(4):
    ROTATION = torch.kron(ROTATION, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
ROTATION = (ROTATION / 32**0.5).bfloat16()


def _as_fp_quant(divisor, rotation=ROTATION):
    def change(tensors):
        changed = {}
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight_packed" and module != "lm_head":
                others = {"weight_global_scale": torch.tensor([divisor]), "act_global_scale": torch.tensor([3.0]),
                          "forward_hadamard_matrix": rotation, "backward_hadamard_matrix": rotation}  # fmt: skip
                changed |= {f"{module}.{key}": value.clone() for key, value in others.items()}
                changed |= {f"{module}.qweight": tensor, f"{module}.weight": torch.zeros(0)}
            elif kind == "weight_scale" and module != "lm_head":
                changed[f"{module}.scales"] = tensor
            elif module != "lm_head":
                changed[name] = tensor
        return {**changed, "lm_head.weight": torch.ones(300, 64, dtype=torch.bfloat16)}

    return change


@torch.no_grad()
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_fp_quant(rewritten, divisor):
    """Values are divided by `weight_global_scale`, and inputs rotated."""
    original, folder = rewritten(_as_fp_quant(divisor), FP_QUANT)
    layer, before = (model.get_submodule(LAYER) for model in (load_packed_model(folder), original))
    assert layer.weight_scale.dtype == (torch.uint8 if divisor == 1 else torch.float32)
    codes = pt2mx.dequantize_mx(before.weight_data, torch.full_like(before.weight_scale, 127), "mxfp4")
    scales = before.weight_scale.view(torch.float8_e8m0fnu).float() / divisor
    assert torch.equal(layer.weight, (codes * scales.repeat_interleave(32, -1)).bfloat16())
    x = torch.randn(3, layer.in_features).bfloat16()
    rotated = (x.unflatten(-1, (-1, 32)) @ ROTATION).flatten(-2)
    assert torch.equal(layer(x), torch.nn.functional.linear(rotated, layer.weight))


def test_a_rotation_that_is_not_read(rewritten):
    _, folder = rewritten(_as_fp_quant(1.0, torch.eye(32).roll(1, 0)), FP_QUANT)
    with pytest.raises(MXError, match=r"forward_hadamard_matrix is no symmetric matrix, which is not read"):
        load_packed_model(folder)
