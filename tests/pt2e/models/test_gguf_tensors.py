import re

import numpy as np
import pytest
import torch

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.checkpoints.load import is_mx_checkpoint, load_checkpoint
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.models.gguf_file import GGUFFile
from pt2mx.pt2e.models.gguf_model import config_of, gguf_in
from pt2mx.pt2e.models.gguf_tensors import load_float_gguf
from tests.float_checkpoints import load_packed_model
from tests.gguf_files import finish, write_gguf
from tests.language_models import tiny_decoder

gguf = pytest.importorskip("gguf")

#: whole blocks of NVFP4
_SIZES = {"intermediate_size": 128}
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "mixtral", "qwen2_moe", "gpt_oss")
_WEIGHTS = r"blk\..*(attn_[qkvo].*|qkv|ffn_(gate|up|down)(_exps)?)\.weight"
MXFP4, NVFP4 = {_WEIGHTS: "MXFP4"}, {_WEIGHTS: "NVFP4"}
IDS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))


def _model(family, **fields):
    """Return a tiny model with the settings that llama.cpp has for all models but one, whose norms are no constants."""
    fields |= {"query_pre_attn_scalar": 16} if family.startswith("gemma") else {}
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


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "MXFP4"), ("mixtral", "MXFP4"), ("phi3", "MXFP4"), ("gpt_oss", "MXFP4"), ("llama", "Q8_0"),
     ("mixtral", "Q4_0"), ("mixtral", "NVFP4")],
)  # fmt: skip
def test_codes_have_the_values_of_gguf(family, kind, tmp_path):
    """Each weight of blocks has its codes in the model, with the rows in transformers' order."""
    path = write_gguf(_model(family, **_SIZES), tmp_path / "model.gguf", {_WEIGHTS: kind})
    assert is_mx_checkpoint(path)
    values = load_float_gguf(path).state_dict()
    packed = load_packed_model(path)
    count = 0
    for name, _ in packed.named_buffers():
        if name.endswith("_data"):
            stem = name.removesuffix("_data")
            module, _, attribute = stem.rpartition(".")
            assert torch.equal(getattr(packed.get_submodule(module), attribute), values[stem]), name
            count += 1
    assert count == 2 * {"llama": 7, "mixtral": 6, "phi3": 4, "gpt_oss": 6}[family]
    file = GGUFFile(path)
    stored = file.blocks("blk.0.attn_output.weight")
    expected = gguf.dequantize(stored.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(values["model.layers.0.self_attn.o_proj.weight"].numpy(), expected)


def test_nvfp4_has_a_scale_of_the_tensor(tmp_path):
    """llama.cpp has it beside the blocks, of experts one each; and one of inputs, which stay in high precision."""
    scales = torch.tensor([0.5, 3.0, 0.7, 1.0])
    extra = {"blk.0.attn_q.scale": torch.tensor([0.3]), "blk.1.ffn_down_exps.scale": scales,
             "blk.0.attn_q.input_scale": torch.tensor([2.0])}  # fmt: skip
    path = write_gguf(_model("mixtral", **_SIZES), tmp_path / "model.gguf", NVFP4, extra)
    file, packed, values = GGUFFile(path), load_packed_model(path), load_float_gguf(path)
    assert values.dtype == torch.float32
    for name, factor in (
        ("layers.0.self_attn.o_proj.weight", torch.ones(1)),
        ("layers.1.mlp.experts.down_proj", scales.view(4, 1, 1)),
    ):
        module, _, attribute = f"model.{name}".rpartition(".")
        stored = {"weight": "blk.0.attn_output.weight"}.get(attribute, "blk.1.ffn_down_exps.weight")
        decoded = getattr(packed.get_submodule(module), attribute)
        assert torch.equal(decoded, values.get_parameter(f"model.{name}"))
        assert torch.allclose(decoded, file.values(stored) * factor, rtol=2e-7, atol=0)
    tensor_scale = packed.get_buffer("model.layers.0.self_attn.q_proj.weight_tensor_scale")
    assert torch.equal(tensor_scale, torch.tensor(0.3))
    for value in (float("nan"), 0.0, -1.0):
        write_gguf(
            _model("mixtral", **_SIZES),
            path,
            NVFP4,
            {"blk.0.attn_q.scale": torch.tensor([value])},
        )
        with pytest.raises(MXError, match=r"^blk.0.attn_q.scale is .*: a tensor scale is a positive number"):
            load_packed_model(path)


def test_a_weight_of_several_types_becomes_values(tmp_path):
    kinds = {"blk.0.ffn_gate_exps.weight": "Q8_0", "blk.0.ffn_up_exps.weight": "Q4_0", **MXFP4}
    path = write_gguf(_model("mixtral"), tmp_path / "model.gguf", kinds)
    packed, values = load_packed_model(path), load_float_gguf(path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(packed.get_parameter(name), values.get_parameter(name))
    assert packed.get_buffer("model.layers.1.mlp.experts.gate_up_proj_data").dtype == torch.uint8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4", "Q8_0", "Q4_0"])
def test_a_program_of_codes(kind, tmp_path):
    """The program generates the text of the values; lowered, its layers multiply codes."""
    path = write_gguf(_model("llama", **_SIZES), tmp_path / "model.gguf", {_WEIGHTS: kind})
    loaded = load_checkpoint(path)
    assert loaded.coverage.held == loaded.coverage.values
    expected = load_float_gguf(path)
    tokens = loaded.generate(IDS[:1], max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, expected.generate(IDS[:1], max_new_tokens=8, do_sample=False))
    lowered = pt2mx.lower_to_inductor(loaded.program.module())
    calls = [node.target for node in lowered.graph.nodes]
    assert calls.count(torch.ops.pt2mx.linear_mx.default) == 8
    inputs = decoder.inputs(loaded.layers, loaded.device, IDS)
    with torch.no_grad():
        assert torch.allclose(lowered(**inputs), expected(IDS).logits, atol=1e-5)


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
    finish(writer)
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
