import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.checkpoints.eager_modules import MXEmbedding, MXLinear, PackedWeight
from pt2mx.pt2e.checkpoints.quantization_config import MXHfQuantizer, PT2MXConfig
from pt2mx.pt2e.checkpoints.select_weights import as_matrix
from tests.language_models import tiny_decoder, transformers


def load(folder, config=None, dtype="auto", kind=transformers.AutoModelForCausalLM):
    options = {} if config is None else {"quantization_config": config}
    return kind.from_pretrained(folder, dtype=dtype, **options).eval()


def packed(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedWeight)}


def fake_quantized(folder, quantized, kind=transformers.AutoModelForCausalLM):
    """Return the float model with the values of the quantized one, and quantized inputs."""
    model = load(folder, kind=kind)
    heads = [name for name in ("lm_head",) if name in packed(quantized)]
    for name in heads:  # a head may be the embedding
        model.get_submodule(name).weight = nn.Parameter(model.get_submodule(name).weight.clone())
    for name, module in packed(quantized).items():
        layer = model.get_submodule(name)
        values = pt2mx.fake_quantize_mx(as_matrix(layer, layer.weight.data), module.spec)
        layer.weight.data = as_matrix(layer, values).contiguous()
        if getattr(module, "activation", None):
            layer.register_forward_pre_hook(
                lambda _, args, spec=module.activation: (pt2mx.fake_quantize_mx(args[0], spec), *args[1:])
            )
    return model


def equal_states(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        *(("llama", recipe) for recipe in ("mxint8", "mxfp4_weight_only", "mxfp6_weights_mxfp8_activations")),
        *((family, "mxfp4") for family in ("llama", "gpt2", "gemma2", "falcon", "opt", "mixtral")),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_fake_quantized_weights(tmp_path, family, recipe):
    tiny_decoder(family).save_pretrained(tmp_path)
    quantized = load(tmp_path, PT2MXConfig(recipe))
    ids = torch.randint(256, (3, 16))  # 48 rows: matmuls with dense weights
    assert torch.equal(quantized(ids).logits, fake_quantized(tmp_path, quantized)(ids).logits)
    assert packed(quantized) and not any(
        type(m) is nn.Linear for n, m in quantized.named_modules() if "lm_head" not in n
    )


def test_the_size_of_a_weight_is_that_of_its_codes_and_scales():
    model = tiny_decoder("llama", num_hidden_layers=1)
    config = PT2MXConfig(MXQuantizer().set_global(MXQuantizationConfig(weight="int5{32}")))
    quantizer = MXHfQuantizer(config, pre_quantized=False)
    quantizer._process_model_before_weight_loading(model)
    for name, bits in (("model.layers.0.mlp.up_proj.weight", 8.25), ("model.norm.weight", 32)):
        assert quantizer.param_element_size(model, name, model.get_parameter(name)) == bits / 8


@torch.no_grad()
def test_bert(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.BertModel(transformers.BertConfig(vocab_size=100, **sizes)).save_pretrained(tmp_path)
    quantized = load(tmp_path, PT2MXConfig("mxfp4"), kind=transformers.AutoModel)
    assert isinstance(quantized.encoder.layer[1].attention.self.query, MXLinear)
    assert isinstance(quantized.embeddings.word_embeddings, MXEmbedding)
    ids, mask = torch.randint(100, (3, 16)), torch.ones(3, 16, dtype=torch.int64)
    mask[1, 9:] = 0
    expected = fake_quantized(tmp_path, quantized, transformers.AutoModel)(ids, mask)
    assert torch.equal(quantized(ids, mask).last_hidden_state, expected.last_hidden_state)
    assert torch.equal(quantized(ids, mask).pooler_output, expected.pooler_output)


@torch.no_grad()
def test_logits_are_those_of_the_converted_program(tmp_path):
    tiny_decoder("llama").save_pretrained(tmp_path)
    quantizer = MXQuantizer.from_recipe("mxfp4").set_object_type(torch.ops.aten.scaled_dot_product_attention, None)
    model, ids = load(tmp_path), torch.randint(256, (3, 16))
    model.config.use_cache = False
    exported = torch.export.export(model, (ids,), strict=False).module()
    converted = pt2mx.convert_pt2e(pt2mx.prepare_pt2e(exported, quantizer))
    assert torch.equal(load(tmp_path, PT2MXConfig(quantizer))(ids).logits, converted(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@torch.no_grad()
def test_save_and_load_to_the_bit(tmp_path, dtype):
    tiny_decoder("qwen2").to(dtype).save_pretrained(tmp_path / "float")
    first, last = MXQuantizationConfig(weight="mxfp8", activation="mxfp8"), MXQuantizationConfig(weight="mxint8{16}")
    quantizer = MXQuantizer.from_recipe("mxfp6").set_first(first).set_last(last)
    quantized = load(tmp_path / "float", PT2MXConfig(quantizer, modules_to_not_convert=["up_proj"]))
    quantized.save_pretrained(tmp_path / "packed", max_shard_size="20KB")
    again = load(tmp_path / "packed")
    assert equal_states(quantized, again) and again.dtype == dtype
    assert {name: str(m) for name, m in packed(again).items()} == {
        name: str(m) for name, m in packed(quantized).items()
    }
    assert again.lm_head.spec.block_size == 16 and type(again.model.layers[0].mlp.up_proj) is nn.Linear
    ids = torch.randint(256, (2, 5))
    assert torch.equal(again(ids).logits, quantized(ids).logits) and again(ids).logits.dtype == dtype
    again.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    for path in (tmp_path / "packed").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


@torch.no_grad()
def test_files_hold_the_bytes_of_quantize_mx(tmp_path):
    model = tiny_decoder("llama").bfloat16()
    model.save_pretrained(tmp_path / "float")
    load(tmp_path / "float", PT2MXConfig(weight="mxfp6_e3m2{16}")).save_pretrained(tmp_path / "packed")
    state = load_file(tmp_path / "packed" / "model.safetensors")
    for name in ("model.embed_tokens", "model.layers.1.mlp.down_proj", "lm_head"):
        scale, data = pt2mx.quantize_mx(model.get_submodule(name).weight, "mxfp6_e3m2{16}")
        assert torch.equal(state[f"{name}.weight_packed"], data) and torch.equal(state[f"{name}.weight_scale"], scale)
        assert f"{name}.weight" not in state
    assert state["model.norm.weight"].dtype == torch.bfloat16
    stored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert stored == {
        "quant_method": "pt2mx",
        "recipe": {"": {"weight": "mxfp6_e3m2{16}"}},
        "modules_to_not_convert": None,
    }


def test_the_import_registers_it_with_transformers():
    """`from_pretrained` reads the folder that `save_pretrained` wrote."""
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["pt2mx"] is PT2MXConfig
    assert AUTO_QUANTIZER_MAPPING["pt2mx"] is MXHfQuantizer


@torch.no_grad()
def test_generate(tmp_path):
    tiny_decoder("llama").save_pretrained(tmp_path)
    quantized = load(tmp_path, PT2MXConfig("mxfp4_weight_only"))
    ids = torch.randint(256, (2, 6))
    tokens = quantized.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    for _ in range(8):  # without a cache
        ids = torch.cat([ids, quantized(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, ids)


def test_no_float_copy_is_left(tmp_path):
    tiny_decoder("llama").save_pretrained(tmp_path)
    quantized = load(tmp_path, PT2MXConfig("mxfp4"))
    floats = {name for name, tensor in quantized.state_dict().items() if tensor.is_floating_point()}
    assert all("norm" in name for name in floats)
    assert not any(tensor.is_meta for tensor in [*quantized.parameters(), *quantized.buffers()])
    assert quantized.get_memory_footprint() < 0.2 * load(tmp_path).get_memory_footprint()
    assert quantized.is_quantized and quantized.quantization_method == "pt2mx"


def test_dtype_follows_the_model(tmp_path):
    tiny_decoder("llama").save_pretrained(tmp_path)
    quantized = load(tmp_path, PT2MXConfig("mxfp4_weight_only"), dtype=torch.float16)
    ids = torch.arange(40)[None]
    assert quantized(ids).logits.dtype == quantized.lm_head.weight.dtype == torch.float16


def test_modules_that_are_left_alone(tmp_path):
    tiny_decoder("gemma2").save_pretrained(tmp_path)  # its head is its embedding
    quantized = load(tmp_path, PT2MXConfig("mxfp4", modules_to_not_convert=["lm_head", "model.layers.0", "v_proj"]))
    assert quantized.lm_head.weight is quantized.model.embed_tokens.weight and quantized.config.tie_word_embeddings
    assert all(name.startswith("model.layers.1.") and not name.endswith("v_proj") for name in packed(quantized))
    assert len(packed(quantized)) == 6


@torch.no_grad()
def test_a_tied_head_gets_codes_of_its_own(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=300, tie_word_embeddings=True, pad_token_id=0, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "float")
    quantizer = MXQuantizer.from_recipe("mxfp4").set_module_name("lm_head", MXQuantizationConfig(weight="mxint8"))
    quantized = load(tmp_path / "float", PT2MXConfig(quantizer))
    weight = load(tmp_path / "float").lm_head.weight
    assert torch.equal(quantized.lm_head.weight, pt2mx.fake_quantize_mx(weight, "mxint8"))
    assert torch.equal(quantized.model.embed_tokens.weight, pt2mx.fake_quantize_mx(weight, "mxfp4(even,even)"))
    quantized.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    assert equal_states(again, quantized) and not again.config.tie_word_embeddings
    ids = torch.randint(256, (2, 5))
    assert torch.equal(again(ids).logits, quantized(ids).logits)


@torch.no_grad()
def test_a_bias_that_is_tied_like_the_head(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=100, **sizes))
    model.cls.predictions.bias.normal_()
    model.save_pretrained(tmp_path / "float")
    quantized = load(tmp_path / "float", PT2MXConfig("mxfp4"), kind=transformers.AutoModelForMaskedLM)
    assert torch.equal(quantized.cls.predictions.decoder.bias, model.cls.predictions.bias)
    quantized.save_pretrained(tmp_path / "packed")
    again, ids = load(tmp_path / "packed", kind=transformers.AutoModelForMaskedLM), torch.randint(100, (2, 5))
    assert equal_states(again, quantized)
    assert torch.equal(again(ids).logits, quantized(ids).logits)


@torch.no_grad()
def test_weights_that_an_encoder_and_a_decoder_share_stay(tmp_path):
    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(vocab_size=100, decoder_start_token_id=0, **sizes)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "float")
    quantized = load(tmp_path / "float", PT2MXConfig("mxfp4"), kind=transformers.AutoModelForSeq2SeqLM)
    assert quantized.lm_head.weight is quantized.shared.weight and quantized.config.tie_word_embeddings
    assert isinstance(quantized.decoder.block[0].layer[1].EncDecAttention.q, MXLinear)
    ids = torch.randint(100, (3, 16))
    expected = fake_quantized(tmp_path / "float", quantized, transformers.AutoModelForSeq2SeqLM)
    assert torch.equal(quantized(ids, decoder_input_ids=ids).logits, expected(ids, decoder_input_ids=ids).logits)
    quantized.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed", kind=transformers.AutoModelForSeq2SeqLM)
    assert torch.equal(again(ids, decoder_input_ids=ids).logits, quantized(ids, decoder_input_ids=ids).logits)


def test_a_model_without_layers_to_quantize(tmp_path):
    tiny_decoder("llama").save_pretrained(tmp_path)
    with pytest.raises(MXError, match="selects no linear layer and no embedding of LlamaForCausalLM"):
        load(tmp_path, PT2MXConfig("mxfp4", modules_to_not_convert=["model", "lm_head"]))


def test_dequantize_is_refused(tmp_path):
    tiny_decoder("llama").save_pretrained(tmp_path)
    with pytest.raises(MXError, match="the float weights are gone"):
        load(tmp_path, PT2MXConfig("mxfp4")).dequantize()


def test_training_is_refused(tmp_path):
    tiny_decoder("llama").save_pretrained(tmp_path)
    assert not load(tmp_path, PT2MXConfig("mxfp4")).hf_quantizer.is_trainable
