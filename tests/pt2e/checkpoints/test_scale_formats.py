"""Checkpoints with other scales than E8M0 of 32 values: NVFP4, and FP8 in blocks of 128 x 128."""

import json

import pytest
import torch
from safetensors.torch import save_file

import pt2mx
from pt2mx import convert_checkpoint, lower_to_inductor, save_checkpoint
from pt2mx.pt2e.checkpoints.load import load_checkpoint
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.models import safetensors_shards
from pt2mx.pt2e.models.checkpoint_names import fused_with
from pt2mx.pt2e.models.weight_formats import NVFP4, NVFP4_DIVISOR
from tests.float_checkpoints import float_checkpoint, load_packed_model, tensors
from tests.graph import calls
from tests.language_models import transformers

LAYER = "model.layers.0"
ATTENTION = [f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkvo"]
UP, GATE, DOWN = (f"{LAYER}.mlp.{name}_proj.weight" for name in ("up", "gate", "down"))
MOE = f"{LAYER}.block_sparse_moe"


def stock(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@torch.no_grad()
def test_nvfp4_of_compressed_tensors_is_read_by_transformers(llama, in_format, logits, tmp_path):
    report = in_format(llama, tmp_path / "ct", NVFP4, "compressed-tensors")
    assert set(report.quantized.values()) == {NVFP4_DIVISOR}
    loaded = stock(tmp_path / "ct")
    assert loaded.config.quantization_config.quantization_config.format == "nvfp4-pack-quantized"
    assert torch.equal(logits(loaded), logits(load_packed_model(tmp_path / "ct")))
    written, values = tensors(tmp_path / "ct"), tensors(llama)
    for names in ([UP, GATE], [DOWN]):
        scale = pt2mx.tensor_scale_mx(torch.cat([values[name] for name in names]), NVFP4_DIVISOR)
        assert all(written[f"{name}_global_scale"].equal(scale.reshape(1)) for name in names)
        for name in names:
            scales, data = pt2mx.quantize_mx(values[name], NVFP4_DIVISOR, tensor_scale=scale)
            assert written[f"{name}_packed"].equal(data)
            assert written[f"{name}_scale"].view(torch.uint8).equal(scales)
    convert_checkpoint(tmp_path / "ct", tmp_path / "modelopt", layout="modelopt")
    assert torch.equal(logits(load_packed_model(tmp_path / "modelopt")), logits(loaded))


@pytest.mark.slow
def test_nvfp4_through_a_program(llama, in_format, logits, tmp_path):
    """File -> program -> the same file, and the file of the other layout."""
    in_format(llama, tmp_path / "ct", NVFP4, "compressed-tensors")
    program, model = load_checkpoint(tmp_path / "ct"), stock(llama)
    assert torch.equal(logits(program), logits(load_packed_model(tmp_path / "ct"), mask=True))
    save_checkpoint(program, model, tmp_path / "again", "compressed-tensors")
    save_checkpoint(program, model, tmp_path / "modelopt", "modelopt")
    convert_checkpoint(tmp_path / "ct", tmp_path / "expected", layout="modelopt")
    for first, second in (("ct", "again"), ("expected", "modelopt")):
        one, other = tensors(tmp_path / first), tensors(tmp_path / second)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    program.save_pretrained(tmp_path / "program")
    assert torch.equal(logits(pt2mx.LanguageModel.from_pretrained(tmp_path / "program")), logits(program))


@pytest.mark.compiled
@torch.no_grad()
def test_layers_whose_tensor_scales_differ_are_read(in_format, logits, tmp_path):
    """A layer computes with its own scale, in a matmul of its own."""
    folder, q, k = tmp_path / "ct", *ATTENTION[:2]
    in_format(float_checkpoint("llama", tmp_path / "float", shard="1GB"), folder, NVFP4, "compressed-tensors")
    of_file = tensors(folder)
    of_file[f"{k}_global_scale"] *= 3
    save_file(of_file, folder / "model.safetensors", {"format": "pt"})
    program, model, theirs = load_checkpoint(folder), load_packed_model(folder), stock(folder)
    assert torch.equal(logits(theirs), logits(model)) and torch.equal(logits(program), logits(model, mask=True))
    lowered = lower_to_inductor(program.program.module())
    sizes = [node.meta["val"].shape[-1] for node in calls(lowered, torch.ops.pt2mx.linear_mx.default)]
    rows = {name: of_file[f"{name}_scale"].shape[0] for name in (*ATTENTION, UP, GATE, DOWN)}
    layers = len(program.layers)
    assert sizes.count(rows[UP] + rows[GATE]) == layers and sizes.count(rows[q] + 2 * rows[k]) == layers - 1
    assert sizes.count(rows[q] + rows[k]) == sizes.count(rows[k]) == 1  # of the first layer
    inputs = decoder.inputs(program.layers, program.device, torch.arange(8)[None])
    torch.testing.assert_close(lowered(**inputs), program.program.module()(**inputs), rtol=0.02, atol=0.02)


def test_tensor_scales_of_fused_layers():
    weights = ["a.q_proj.weight", "a.k_proj.weight", "b.k_proj.weight", "a.o_proj.weight", "e.0.w1.weight"]
    assert fused_with("a.k_proj.weight", weights) == {"a.q_proj.weight", "a.k_proj.weight"}
    assert fused_with("a.o_proj.weight", weights) == {"a.o_proj.weight"}
    assert fused_with("e.0.w1.weight", weights) == {"e.0.w1.weight"}


@pytest.mark.parametrize(
    ("layout", "form", "suffixes"),
    [
        ("modelopt", NVFP4, ("", "_scale", "_scale_2")),
        ("compressed-tensors", NVFP4_DIVISOR, ("_packed", "_scale", "_global_scale")),
    ],
)
def test_experts_with_tensor_scales_of_their_own(in_format, tmp_path, layout, form, suffixes):
    """Experts keep a tensor scale each, in the program too, which writes the same files."""
    source = float_checkpoint("mixtral", tmp_path / "float")
    in_format(source, tmp_path / "out", NVFP4, layout)
    model, written = load_packed_model(tmp_path / "out"), tensors(tmp_path / "out")
    experts = model.model.layers[0].mlp.experts
    names = [f"{LAYER}.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(4)]
    expected = []
    for name in names:
        data, scale, tensor_scale = (written[name + suffix] for suffix in suffixes)
        options = {"target_dtype": torch.bfloat16, "tensor_scale": tensor_scale.reshape(())}
        expected.append(pt2mx.dequantize_mx(data, scale.view(torch.uint8), form, **options))
    assert torch.equal(experts.down_proj, torch.stack(expected))
    assert experts.down_proj_scale.dtype == torch.uint8 and experts.down_proj_tensor_scale.shape == (4,)


@pytest.mark.slow
@torch.no_grad()
def test_a_program_of_experts_with_tensor_scales(in_format, logits, tmp_path):
    """It writes the same files, in NVFP4 of gpt-oss's experts too, and its lowered graph keeps the codes packed."""
    source = float_checkpoint("mixtral", tmp_path / "float")
    in_format(source, tmp_path / "modelopt", NVFP4, "modelopt")
    program, model = load_checkpoint(tmp_path / "modelopt"), stock(source)
    assert torch.equal(logits(program), logits(load_packed_model(tmp_path / "modelopt"), mask=True))
    save_checkpoint(program, model, tmp_path / "again", "modelopt")
    one, other = tensors(tmp_path / "modelopt"), tensors(tmp_path / "again")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    lowered = lower_to_inductor(program.program.module())
    matmuls = [node for node in lowered.graph.nodes if node.target == torch.ops.pt2mx.grouped_linear_mx.default]
    assert len(matmuls) == 4 and all(node.args[-1].meta["val"].shape == (4,) for node in matmuls)
    inputs = decoder.inputs(program.layers, program.device, torch.arange(8)[None])
    torch.testing.assert_close(lowered(**inputs), program.program.module()(**inputs), rtol=0.02, atol=0.02)


@pytest.fixture
def wide(tmp_path):
    """A float checkpoint whose layers, but the head, have whole blocks of 128 x 128."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(**sizes, vocab_size=300, bos_token_id=1, eos_token_id=None, pad_token_id=257)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "fields", "scales", "left"),
    [
        ("fp8_e4m3{128x128}(f32)", {"quant_method": "fp8"}, torch.float32, "loaders would divide its 300 x 128 values"),
        (
            "fp8_e4m3{128x128}",
            {"quant_method": "fp8", "scale_fmt": "ue8m0"},
            torch.float8_e8m0fnu,
            "no engine is known to load a quantized head in fp8",
        ),
    ],
)
@torch.no_grad()
def test_transformers_reads_blocks_of_128_rows(wide, in_format, logits, tmp_path, form, fields, scales, left):
    report = in_format(wide, tmp_path / "fp8", form, "fp8")
    assert report.left["lm_head.weight"].startswith(left)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert fields.items() <= config.items() and config["weight_block_size"] == [128, 128]
    written = tensors(tmp_path / "fp8")
    assert written[f"{DOWN}_scale_inv"].shape == (1, 2) and written[f"{DOWN}_scale_inv"].dtype == scales
    loaded = load_packed_model(tmp_path / "fp8")
    assert torch.equal(logits(stock(tmp_path / "fp8")), logits(loaded))
    assert torch.equal(logits(load_checkpoint(tmp_path / "fp8")), logits(loaded, mask=True))
    if form.endswith("}"):
        convert_checkpoint(tmp_path / "fp8", tmp_path / "compressed", layout="compressed-tensors")
        assert torch.equal(logits(stock(tmp_path / "compressed")), logits(loaded))
        save_checkpoint(load_checkpoint(tmp_path / "fp8"), stock(wide), tmp_path / "again", "fp8")
        again = tensors(tmp_path / "again")
        assert all(torch.equal(again[name].view(torch.uint8), written[name].view(torch.uint8)) for name in written)


@pytest.mark.parametrize("form", ["fp8_e4m3{128x128}(f32)", "fp8_e4m3{128x128}"])
@torch.no_grad()
def test_the_last_block_may_be_shorter(in_format, logits, tmp_path, form, monkeypatch):
    """`quantize_mx` gives the codes and scales, `dequantize_mx` the values, for experts that merge too, and for weights
    that are read in slices."""
    monkeypatch.setattr(safetensors_shards, "SLICE", 128 * 2 * 192)
    sizes = {"hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "num_local_experts": 2, "vocab_size": 300, "pad_token_id": 257}
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).bfloat16().save_pretrained(tmp_path / "float")
    report = in_format(tmp_path / "float", tmp_path / "fp8", form, "fp8")
    assert set(report.left) == {"model.embed_tokens.weight", "lm_head.weight", *ATTENTION, f"{MOE}.gate.weight"}
    floats, written = tensors(tmp_path / "float"), tensors(tmp_path / "fp8")
    for name in report.quantized:
        scale, data = pt2mx.quantize_mx(floats[name], form)
        assert scale.shape == (-(-data.shape[0] // 128), -(-data.shape[1] // 128))
        assert torch.equal(written[name].view(torch.uint8), data)
        assert torch.equal(written[f"{name}_scale_inv"].view(scale.dtype), scale)
        floats[name] = pt2mx.dequantize_mx(data, scale, form, target_dtype=torch.bfloat16)
    save_file(floats, tmp_path / "float" / "model.safetensors", {"format": "pt"})
    assert torch.equal(logits(load_packed_model(tmp_path / "fp8")), logits(stock(tmp_path / "float")))
