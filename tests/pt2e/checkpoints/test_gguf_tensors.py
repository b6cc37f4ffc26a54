import re

import numpy as np
import pytest
import torch

from pt2mx import MXError, ops
from pt2mx.pt2e.checkpoints.gguf_file import GGUFFile
from pt2mx.pt2e.checkpoints.gguf_model import config_of, gguf_in
from pt2mx.pt2e.checkpoints.gguf_tensors import load_float_gguf
from pt2mx.pt2e.checkpoints.load import is_mx_checkpoint, load_checkpoint, load_packed_model
from tests.gguf_files import write_gguf
from tests.language_models import tiny_decoder

gguf = pytest.importorskip("gguf")

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "qwen2_moe")
MXFP4 = {r"blk\..*(attn_[qkvo].*|qkv|ffn_(gate|up|down)(_exps)?)\.weight": "MXFP4"}
IDS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))


def _model(family):
    """Return a tiny model with the settings that llama.cpp has for all models but one, whose norms are no constants."""
    fields = {"query_pre_attn_scalar": 16} if family.startswith("gemma") else {}
    fields |= {"shared_expert_intermediate_size": 64} if family == "qwen2_moe" else {}
    model = tiny_decoder(family, **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += torch.arange(len(parameter)) / 64
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_float_file_is_the_model(family, tmp_path):
    model = _model(family)
    loaded = load_float_gguf(write_gguf(model, tmp_path / "model.gguf"))
    assert type(loaded) is type(model) and loaded.dtype == torch.float32
    state, expected = loaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral", "phi3"])
def test_codes_have_the_values_of_gguf(family, tmp_path):
    """Each weight in MXFP4 has its codes in the model, with the rows in transformers' order."""
    path = write_gguf(_model(family), tmp_path / "model.gguf", MXFP4)
    assert is_mx_checkpoint(path)
    values = load_float_gguf(path).state_dict()
    packed = load_packed_model(path)
    count = 0
    for name, data in packed.named_buffers():
        if name.endswith("_data"):
            stem = name.removesuffix("_data")
            scale = packed.get_buffer(f"{stem}_scale")
            axis, length = data.dim() - 1, values[stem].shape[-1]
            decoded = ops.dequantize_mx(data, scale, "fp4_e2m1", 32, torch.float32, axis, length)
            assert torch.equal(decoded, values[stem]), name
            count += 1
    assert count == 2 * {"llama": 7, "mixtral": 6, "phi3": 4}[family]


@pytest.mark.slow
def test_a_program_of_codes(tmp_path):
    path = write_gguf(_model("llama"), tmp_path / "model.gguf", MXFP4)
    loaded = load_checkpoint(path)
    assert loaded.coverage.held == loaded.coverage.values
    expected = load_float_gguf(path)
    tokens = loaded.generate(IDS[:1], max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, expected.generate(IDS[:1], max_new_tokens=8, do_sample=False))


def test_dtypes(tmp_path):
    model = _model("llama")
    for matrices, dtype in (("BF16", torch.bfloat16), ("F16", torch.float16), ("Q8_0", torch.float32)):
        path = write_gguf(model, tmp_path / "model.gguf", {**MXFP4, ".*embd.*|output.weight": matrices})
        assert config_of(GGUFFile(path)).dtype == dtype
    assert load_float_gguf(path, torch.bfloat16).dtype == torch.bfloat16


def test_llama_3_scales_rope(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 5e5}  # fmt: skip
    model = tiny_decoder("llama", rope_parameters=scaling, max_position_embeddings=65536)
    frequencies = 5e5 ** (-torch.arange(0, 16, 2) / 16)
    factors = frequencies / model.model.rotary_emb.inv_freq
    path = write_gguf(model, tmp_path / "model.gguf", extra={"rope_freqs.weight": factors})
    with torch.no_grad():
        assert torch.allclose(load_float_gguf(path)(IDS).logits, model(IDS).logits, atol=1e-6)
    write_gguf(model, path, extra={"rope_freqs.weight": factors * 2})
    with pytest.raises(MXError, match="scales RoPE by factors other than Llama 3's"):
        load_float_gguf(path)


def test_files_of_other_models(tmp_path):
    path, model = tmp_path / "model.gguf", _model("llama")
    write_gguf(model, path, extra={"blk.0.attn_gate.weight": torch.ones(4, 32)})
    with pytest.raises(MXError, match=re.escape("holds blk.0.attn_gate.weight, which LlamaForCausalLM has not")):
        load_float_gguf(path)
    write_gguf(model, path, left_out="blk.1.ffn_up.weight")
    with pytest.raises(MXError, match=r"lacks blk.1.ffn_up.weight, which the model has as model.layers.1.mlp.up_proj"):
        load_float_gguf(path)
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_tensor("w", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(MXError, match="holds a model of the architecture 'bert': pt2mx reads llama, qwen2"):
        load_float_gguf(path)


def test_where_the_file_is(tmp_path):
    assert gguf_in(tmp_path) is None and gguf_in("org/name") is None
    (tmp_path / "a.gguf").touch()
    assert gguf_in(tmp_path) == tmp_path / "a.gguf" == gguf_in(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(MXError, match=r"holds 2 GGUF files: give one of them, such as '.*a\.gguf'"):
        gguf_in(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert gguf_in(tmp_path) is None
