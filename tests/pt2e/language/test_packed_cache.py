import pytest
import torch
from torch.utils import _pytree as pytree

import pt2mx
from pt2mx import LanguageModel, MXError, MXQuantizer, quantize_language_model
from pt2mx.pt2e.language import decoder
from pt2mx.pt2e.language.cache import empty_cache
from pt2mx.pt2e.language.layers import layers_of
from pt2mx.pt2e.language.packed_cache import layers_in, pack_cache
from pt2mx.pt2e.program.build_program import program_of
from tests.flow import described
from tests.language_models import check_compiled, exported_decoder, padded, quantized_decoder, transformers

#: bytes of the codes and the scales of a head's 16 values
BYTES = {"mxfp8": (16, 1), "mxint8": (16, 1), "mxfp6": (12, 1), "mxfp4": (8, 1), "mxfp8{8}": (16, 2), "nvfp4": (8, 1)}


def quantizer(kv_cache="mxfp8"):
    return MXQuantizer.from_recipe("mxfp4_weight_only").set_kv_cache(kv_cache)


def steps(model, layers, ids, mask):
    """Return the logits of a prompt of 8 tokens, and of each later token."""
    call = decoder.inputs(layers, torch.device("cpu"), ids)
    call["attention_mask"], call["position_ids"] = mask, (mask.cumsum(1) - 1).clamp(min=0)
    result = []
    for first, last in ((0, 8), *((i, i + 1) for i in range(8, ids.shape[1]))):
        here = {name: call[name][:, first:last] for name in ("input_ids", "position_ids")}
        kept = torch.arange(last - first)
        result.append(model(**{**call, **here, "start": torch.tensor([first]), "logits_to_keep": kept}))
    return torch.cat(result, 1), (call["keys"], call["values"])


@pytest.mark.compiled
@pytest.mark.slow_cases("gemma3-fields0-mxfp8", "llama-fields4-mxfp6", "llama-fields5-mxfp4")
@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "fields", "kv_cache"),
    [
        ("gemma3", {}, "mxfp8"),
        pytest.param("gpt2", {}, "mxfp8", marks=pytest.mark.slow),
        *(
            pytest.param("llama", {"num_hidden_layers": 1}, name, marks=pytest.mark.slow if name == "mxint8" else ())
            for name in BYTES
        ),
        pytest.param("gemma4", {"global_head_dim": 16}, "mxfp8", marks=pytest.mark.slow),  # layers share keys
    ],
)
def test_codes_give_the_bits_of_the_prepared_model(family, fields, kv_cache):
    model, program = exported_decoder(family, **fields)
    layers, graph = layers_of(model), program.module()
    prepared = pt2mx.prepare_pt2e(graph, quantizer(kv_cache))
    ids, mask = padded()
    steps(prepared, layers, ids, mask)
    converted = pt2mx.convert_pt2e(prepared)
    pt2mx.enable_fake_quant(prepared)
    expected, cache = steps(prepared, layers, ids, mask)
    packed = pack_cache(converted)
    widths = [tuple(t.shape[3] for t in layer["keys"]) for layer in layers_in(packed)]
    assert widths == [BYTES[kv_cache]] * sum(map(bool, layers))
    example = decoder.inputs(layers_in(packed), torch.device("cpu"))
    traced, made = decoder.export(packed, example), program_of(packed, program, example)
    made_rows, traced_rows = ([row for row in described(one) if "_assert_" not in row] for one in (made, traced))
    assert made_rows == traced_rows  # apart from the checks of casts
    assert made.call_spec.in_spec == traced.call_spec.in_spec
    assert len(made.range_constraints) == len(traced.range_constraints) == 4
    for run in (packed, traced.module(), made.module()):
        result, codes = steps(run, layers_in(packed), ids, mask)
        assert torch.equal(result, expected)
        assert all(tensor.dtype == torch.uint8 for tensor in pytree.tree_leaves(codes))
    assert not torch.equal(steps(graph, layers, ids, mask)[0], expected)
    assert cache[0][0].abs().sum() > 0


@torch.no_grad()
def test_a_tensor_scale_is_1():
    model, program = exported_decoder("llama", num_hidden_layers=1)
    layers, graph, (ids, mask) = layers_of(model), program.module(), padded()
    packed = pack_cache(pt2mx.convert_pt2e(pt2mx.prepare_pt2e(graph, MXQuantizer().set_kv_cache("nvfp4"))))
    (_, exact), (_, stored) = steps(graph, layers, ids, mask), steps(packed, layers_in(packed), ids, mask)
    for values, (codes, scale) in ((exact[i][0], stored[i][0]) for i in (0, 1)):  # keys, values
        written = values.flatten(2).any(2)  # codes of zeros that were never written have no scale
        one = {"tensor_scale": torch.tensor(1.0)}
        got = pt2mx.dequantize_mx(codes, scale, "nvfp4", **one)
        want = pt2mx.fake_quantize_mx(values, "nvfp4", **one)
        assert written.any() and torch.equal(got, want) and not torch.equal(want, values)


@pytest.fixture(scope="module")
def quantized():
    return quantized_decoder("llama", quantizer())


@torch.no_grad()
def test_generate_save_and_load(quantized, tmp_path):
    ids, mask = padded()
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = quantized.generate(ids, **options)
    quantized.save_pretrained(tmp_path, quantizer())
    loaded = LanguageModel.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded.generate(ids, **options), expected)
    beams = loaded.generate(ids, **options, num_beams=3)
    assert torch.equal(beams, quantized.generate(ids, **options, num_beams=3)) and beams.shape == expected.shape
    recipe = MXQuantizer.from_recipe(tmp_path / "recipe.yaml") if (tmp_path / "recipe.yaml").exists() else None
    assert recipe is None or str(recipe.kv_cache) == "mxfp8_e4m3{32}"
    # bytes of a token: 2 layers, keys and values, 2 heads, 16 codes and a scale each
    cache = empty_cache(loaded.layers, 1, 10, torch.device("cpu"))
    assert sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors) == 10 * 2 * 2 * 2 * 17


@pytest.mark.compiled
@pytest.mark.parametrize("kv_cache", ["mxint8", "mxfp8"])
def test_compiled(kv_cache):
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 300}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_attention_heads=3, num_key_value_heads=3)
    quantized = quantize_language_model(transformers.LlamaForCausalLM(config).eval(), quantizer(kv_cache))
    ids, mask = padded()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    check_compiled(quantized, ids, attention_mask=mask, **options)


def test_a_growing_cache(quantized):
    ids = torch.randint(256, (1, 300))
    with torch.no_grad():
        expected = quantized(ids).logits
        first = quantized(ids[:, :200])
        assert first.past_key_values.layers[0].get_max_length() == 256
        second = quantized(ids[:, 200:], past_key_values=first.past_key_values)
    assert torch.allclose(torch.cat([first.logits, second.logits], 1), expected, atol=1e-5)


def test_the_setting_in_recipes_and_dictionaries(tmp_path):
    text = quantizer("mxfp4{16}").to_recipe(tmp_path / "recipe.yaml")
    assert text.endswith("kv_cache: mxfp4_e2m1{16}\n")
    read = MXQuantizer.from_recipe(tmp_path / "recipe.yaml")
    assert read.kv_cache == quantizer("mxfp4{16}").kv_cache
    assert MXQuantizer.from_dict(read.to_dict()).to_dict() == read.to_dict()
    assert MXQuantizer.from_recipe("mxfp4").kv_cache is None
    (tmp_path / "cache_only.yaml").write_text("kv_cache: mxfp8\n")
    assert MXQuantizer.from_recipe(tmp_path / "cache_only.yaml").kv_cache == pt2mx.parse("mxfp8")
    with pytest.raises(MXError, match="kv_cache"):
        MXQuantizer().set_kv_cache("fp3")
    with pytest.raises(MXError, match="blocks of 2 rows, which are tokens"):
        MXQuantizer().set_kv_cache("mxfp8{2x32}")
    (tmp_path / "bad.yaml").write_text("kv_cache: [mxfp8]\n")
    with pytest.raises(MXError, match="kv_cache"):
        MXQuantizer.from_recipe(tmp_path / "bad.yaml")


def test_a_model_without_a_cache_is_warned_about():
    x = torch.randn(2, 64)
    exported = torch.export.export(torch.nn.Linear(64, 8).eval(), (x,)).module()
    with pytest.warns(UserWarning, match="writes to no cache"):
        pt2mx.prepare_pt2e(exported, quantizer())


def test_first_and_last_do_not_count_the_cache():
    config = pt2mx.MXQuantizationConfig(weight="mxfp8")
    graph = exported_decoder("llama")[1].module()
    chosen = quantizer().set_first(config, 2).set_operator_type("aten.embedding", None)
    prepared = pt2mx.prepare_pt2e(graph, chosen)
    rows = [row for row in pt2mx.quantization_report(prepared).operators if row.quantized]
    writes = [row for row in rows if row.operator == "aten.index_copy_"]
    assert len(writes) == 4 and all(row.operands[0].spec == "mxfp8_e4m3{32}" for row in writes)
    linears = [row for row in rows if row.operator == "aten.linear"]
    formats = [next(one.spec for one in row.operands if one.role == "weight") for row in linears]
    assert [text.startswith("mxfp8") for text in formats[:4]] == [True, True, False, False]
