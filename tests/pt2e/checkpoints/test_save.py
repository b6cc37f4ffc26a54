import copy
import json
import re
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file

import pt2mx
from pt2mx import MXError
from pt2mx.fx.graph.tensors import copy_sharing_tensors, map_tensors
from pt2mx.pt2e.checkpoints.save import _write_tensors, save_checkpoint
from tests.engines.vllm.expectations import refusals
from tests.float_checkpoints import load_packed_model
from tests.language_models import transformers
from tests.pt2e.checkpoints.conftest import INPUTS

FP4, FP6, FP8 = "mxfp4{32}(even,even)", "mxfp6{32}(even,even)", "mxfp8_e4m3{32}(rceil)"
E3M2, CT = "mxfp6_e3m2{32}", "compressed-tensors"
EMBEDDING, ALL = ".*embed_tokens", ".*"
OTHERS = {EMBEDDING: None, ".*mlp.gate": None}
MIXED = {EMBEDDING: None, ".*o_proj": (FP8, None), ".*mlp.*": (FP4, FP6), ".*head": None, ALL: (FP4, None)}

pytestmark = pytest.mark.filterwarnings("ignore:the setting module_name_regex")


def files(folder):
    return {path.name for path in folder.iterdir()}


def stock(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.compiled_except("llama-*", "qwen2-settings1-*")
@pytest.mark.slow_cases("mixtral-settings4-mxfp4-pack-quantized", "gpt_oss-settings6-mxfp6-pack-quantized")
@pytest.mark.parametrize(
    ("family", "settings", "form"),
    [
        ("llama", {EMBEDDING: None, ALL: (FP4, FP4)}, "mxfp4-pack-quantized"),
        ("qwen2", {EMBEDDING: None, ALL: (FP6, FP6)}, "mxfp6-pack-quantized"),
        ("qwen2", {ALL: (FP8, None)}, "mxfp8-quantized"),
        ("llama", MIXED, "mixed-precision"),
        ("mixtral", {**OTHERS, ALL: (FP4, None)}, "mxfp4-pack-quantized"),
        ("mixtral", {**OTHERS, ".*experts": (FP6, None), ALL: (FP4, FP4)}, "mixed-precision"),
        ("gpt_oss", {EMBEDDING: None, ".*mlp.*": None, ALL: (FP6, FP6)}, "mxfp6-pack-quantized"),
    ],
)
def test_compressed_tensors_computes_the_same_logits(bf16, convert, logits, tmp_path, family, settings, form):
    float_one = bf16(family)
    converted = convert(float_one.graph, settings)
    save_checkpoint(converted, float_one.model, tmp_path / "out")
    assert torch.equal(logits(load_packed_model(tmp_path / "out")), logits(converted))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == form
    has_six_bits = any(FP6 in pair for pair in settings.values() if pair)
    if has_six_bits and Version(version("compressed-tensors")) < Version("0.20"):
        pytest.skip("the last compressed-tensors for Python 3.10 reads no elements of six bits")
    loaded = stock(tmp_path / "out")
    assert loaded.config.quantization_config.quantization_config.format == form
    assert torch.equal(logits(loaded), logits(converted))


@pytest.mark.compiled
def test_gpt_oss_is_read_by_transformers(bf16, convert, logits, tmp_path):
    float_one = bf16("gpt_oss")
    converted = convert(float_one.graph, {".*experts": (FP4, None)})
    save_checkpoint(converted, float_one.model, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (4, 192, 2, 16)
    assert tensors["model.layers.0.mlp.experts.down_proj_scales"].shape == (4, 64, 3)
    loaded = stock(tmp_path / "out", quantization_config=transformers.Mxfp4Config(dequantize=True))
    assert torch.equal(logits(loaded), logits(converted))
    assert torch.equal(logits(load_packed_model(tmp_path / "out")), logits(converted))


@pytest.mark.compiled_except("granitemoe-*", "gpt_oss-*")
@pytest.mark.parametrize(
    ("family", "settings", "unpack"),
    [
        ("granitemoe", {".*experts": None, ".*router": None}, []),  # experts in one tensor, in high precision
        ("roberta", {".*embeddings": None}, []),  # the head's bias is tied like its weight
        ("gpt_oss", {".*router": None}, [".*experts"]),  # their parameter is transposed
        ("gpt2", {".*attn": None, ".*wpe": None}, [".*wte", ".*mlp.*"]),  # their weights are (in, out)
    ],
)
def test_names_and_forms_that_transformers_looks_for(bf16, convert, logits, tmp_path, family, settings, unpack):
    float_one = bf16(family)
    if family == "roberta":
        float_one.model.lm_head.bias.data.normal_()
    converted = convert(float_one.graph, {EMBEDDING: None, **settings, ALL: (FP4, None)})
    save_checkpoint(converted, float_one.model, tmp_path / "out", "compressed-tensors", unpack=unpack)
    assert torch.equal(logits(stock(tmp_path / "out")), logits(converted))
    assert torch.equal(logits(load_packed_model(tmp_path / "out")), logits(converted))


@torch.no_grad()
def test_an_encoder(convert, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=100, **sizes)).bfloat16().eval()
    ids = torch.arange(20).reshape(2, 10)
    converted = convert(torch.export.export(model, (ids,), strict=False).module(), {".*embed.*": None, ALL: (FP4, FP4)})
    save_checkpoint(converted, model, tmp_path / "out")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(ids).last_hidden_state, converted(ids).last_hidden_state)
    assert files(tmp_path / "out") == {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_transformers_reads_fp8(bf16, convert, logits, tmp_path, family):
    float_one = bf16(family)
    settings = {**OTHERS, ".*router": None, ".*experts": None if family == "gpt_oss" else (FP8, None), ALL: (FP8, None)}
    converted = convert(float_one.graph, settings)
    save_checkpoint(converted, float_one.model, tmp_path / "out", "fp8")
    assert torch.equal(logits(stock(tmp_path / "out")), logits(converted))


@pytest.mark.parametrize(
    ("family", "layout", "settings", "scales"),
    [
        ("llama", None, {".*head|.*o_proj": (E3M2, E3M2), ".*q_proj": (FP4, None)}, 3),
        ("mixtral", "quark", {".*experts": (E3M2, None), ".*k_proj": (FP8, None)}, 13),
        ("mixtral", CT, {".*experts|.*k_proj": (FP8, None)}, 13),
        ("llama", "modelopt", {".*q_proj|.*down_proj": (FP8, FP8)}, 2),
        ("qwen2", "fp8", {".*mlp.*": (FP8, None)}, 3),
    ],
)
def test_layouts_without_an_installed_reader(bf16, convert, logits, tmp_path, family, layout, settings, scales):
    float_one = bf16(family)
    converted = convert(float_one.graph, {**settings, ALL: None})
    save_checkpoint(converted, float_one.model, tmp_path / "out", layout)
    method = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["quant_method"]
    assert method == {None: "quark", "fp8": "mxfp8"}.get(layout, layout)
    assert ("hf_quant_config.json" in files(tmp_path / "out")) == (layout == "modelopt")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(name.endswith(("_scale", "_scale_inv")) for name in tensors) == scales
    assert all(tensor.dtype in (torch.bfloat16, torch.uint8, torch.float8_e4m3fn) for tensor in tensors.values())
    for name, buffer in converted.named_buffers():
        weight, _, kind = name.rpartition("_")
        if weight in tensors and kind in ("data", "scale"):
            stored = tensors[weight if kind == "data" else weight + ("_scale_inv" if layout == "fp8" else "_scale")]
            assert torch.equal(stored.view(torch.uint8), buffer)
    assert torch.equal(logits(load_packed_model(tmp_path / "out")), logits(converted))


def test_a_tied_head_shards_and_what_is_unpacked(bf16, convert, logits, tmp_path):
    float_one = bf16("llama", tie_word_embeddings=True)
    converted = convert(float_one.graph, {".*k_proj": None, ALL: (FP4, None)})
    unpack = [EMBEDDING, ".*v_proj"]
    save_checkpoint(converted, float_one.model, tmp_path / "out", unpack=unpack, max_shard_size=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert {"lm_head.weight_packed", "model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight"} <= {*index}
    assert len(set(index.values())) > 1
    loaded = stock(tmp_path / "out")
    assert not loaded.config.tie_word_embeddings
    assert torch.equal(logits(loaded), logits(converted))
    assert torch.equal(logits(load_packed_model(tmp_path / "out")), logits(converted))


def test_a_tied_head_in_high_precision_stays_tied(bf16, convert, logits, tmp_path):
    float_one = bf16("qwen2", tie_word_embeddings=True)
    converted = convert(float_one.graph, {".*mlp.*": (FP4, None)})
    save_checkpoint(converted, float_one.model, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(logits(stock(tmp_path / "out")), logits(converted))
    assert torch.equal(logits(load_packed_model(tmp_path / "out")), logits(converted))


@pytest.mark.compiled_except("modelopt-*")
@pytest.mark.parametrize(
    ("layout", "form", "settings"),
    [
        (CT, FP4, {EMBEDDING: None, ALL: (FP4, None)}),
        (CT, FP4, {".*_proj": (FP4, None)}),  # the embedding and the head are values
        ("modelopt", "nvfp4", {EMBEDDING: None, ".*head": None, ALL: ("nvfp4", None)}),
    ],
)
def test_rotations_in_the_weights_of_a_tied_model(bf16, convert, quantizer, logits, tmp_path, layout, form, settings):
    """No operation at run time is left: the checkpoint has an embedding and a head of its own, and gains of one."""
    float_one = bf16("llama", tie_word_embeddings=True)
    graph = copy_sharing_tensors(float_one.graph)
    map_tensors(
        graph, lambda tensor: tensor + torch.linspace(-0.5, 0.5, 64).to(tensor) if tensor.shape == (64,) else tensor
    )
    algorithms = {"rotation": {"online": False}, "scale_search": None}
    rotated = pt2mx.optimize(graph, quantizer(settings).set_algorithms(algorithms), [INPUTS])
    converted = convert(rotated, settings)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(float_one.model.config)
    save_checkpoint(converted, skeleton, tmp_path / "out", layout)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight" in stored and any(name.startswith("lm_head.weight") for name in stored)
    assert stored["model.norm.weight"].eq(1).all()
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert torch.equal(logits(load_packed_model(tmp_path / "out")), logits(converted))
    if layout == CT:  # transformers reads no checkpoints of ModelOpt
        assert torch.equal(logits(stock(tmp_path / "out")), logits(converted))
    exact = logits(graph).float()
    assert (logits(converted).float() - exact).norm() < 0.5 * exact.norm()


def test_rounded_weights_and_a_model_without_memory(bf16, convert, quantizer, logits, tmp_path):
    float_one, settings = bf16("llama", tie_word_embeddings=True), {".*_proj|.*head": (FP4, None)}
    rounded = pt2mx.optimize(float_one.graph, quantizer(settings).set_algorithms("fast"), [])
    converted = convert(rounded, settings)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(float_one.model.config)
    save_checkpoint(converted, skeleton, tmp_path / "out")
    result = {name: t for name, t in load_packed_model(tmp_path / "out").named_buffers() if t.dtype == torch.uint8}
    buffers = {name.replace("_rounded", ""): tensor for name, tensor in converted.named_buffers()}
    assert len(result) == 16 and any("_rounded" in name for name, _ in converted.named_buffers())
    for name, tensor in result.items():
        assert any(
            torch.equal(tensor, buffers[same]) for same in (name, f"model.embed_tokens.{name[8:]}") if same in buffers
        )
    assert torch.equal(logits(stock(tmp_path / "out")), logits(converted))


@pytest.mark.compiled_cases("llama4-*", "falcon-*", "mamba-*")
@pytest.mark.parametrize(
    ("family", "layout", "settings", "text"),
    [
        ("llama", None, {".*q_proj": ("mxint8", None)}, "no layout has weights in int8"),
        ("llama", "quark", {".*q_proj": ("mxint8", None)}, "quark cannot hold model.layers.0.self_attn.q_proj.weight"),
        ("llama", None, {".*q_proj": ("mxfp4{16}", None)}, "q_proj.weight has blocks of 16"),
        ("llama", None, {EMBEDDING: (FP4, None)}, "take embeddings in fp8_e4m3 alone: leave model.embed_tokens"),
        ("llama", CT, {".*q_proj": ("mxfp4", "mxfp4")}, "inputs of model.layers.0.self_attn.q_proj are mxfp4"),
        ("llama", CT, {".*q_proj": ("mxfp4", "mxfp6_e3m2")}, "it has fp4_e2m1 with scale_mode even"),
        ("llama", None, {ALL: ("mxfp8_e5m2", None)}, "no layout has weights in fp8_e5m2"),
        ("llama", "mxfp4", {".*q_proj": (FP4, None)}, "mxfp4 holds experts alone"),
        ("llama", "modelopt", {".*q_proj": (FP8, None)}, "modelopt quantizes inputs too"),
        ("llama", "fp8", {".*q_proj": (FP8, FP8)}, "fp8 holds weights alone"),
        ("llama", "awq", {".*q_proj": (FP8, FP8)}, "unknown layout 'awq'"),
        ("mixtral", None, {".*mlp.gate": (FP4, None)}, "weight of a MixtralTopKRouter"),
        ("mixtral", None, {".*experts": (FP4, FP4)}, "quantize no inputs of experts"),
        ("mixtral", None, {".*q_proj": (FP4, None)}, "quantize experts too"),
        ("mixtral", "mxfp4", {".*experts": (FP4, None)}, "read for experts as gpt-oss has them alone"),
        ("gpt_oss", "quark", {".*experts": (FP4, None)}, "no place for model.layers.0.mlp.experts"),
        ("granitemoe", "quark", {".*experts": (FP4, None)}, "no place for model.layers.0.block_sparse_moe.experts"),
        (
            "llama4",
            None,
            {".*q_proj": (FP4, None)},
            "would not find the weights of model.layers.0.feed_forward.experts",
        ),
        ("llama", "fp8", {EMBEDDING: (FP8, None)}, "fp8 take no packed embeddings: leave model.embed_tokens"),
        ("falcon", None, {".*dense_h_to_4h": (FP4, None)}, "is the weight of a FalconLinear"),
        ("mamba", None, {".*conv1d|.*mixer": (FP4, None)}, "conv1d.weight is the weight of a Conv1d"),
    ],
)
def test_what_a_layout_cannot_hold(bf16, convert, tmp_path, family, layout, settings, text):
    float_one = bf16(family)
    with pytest.raises(MXError, match=re.escape(text)):
        save_checkpoint(convert(float_one.graph, settings), float_one.model, tmp_path / "out", layout)
    assert not files(tmp_path)


@pytest.mark.compiled
def test_what_no_checkpoint_holds(bf16, convert, tmp_path):
    float_one, settings = bf16("llama"), {".*q_proj": (FP4, None)}
    model, converted = float_one.model, convert(float_one.graph, settings)
    fp8 = pt2mx.MXQuantizationConfig(activation="mxfp8")
    attention = pt2mx.MXQuantizer().set_operator_type("aten.scaled_dot_product_attention", fp8)
    full = copy.deepcopy(model).float()
    full_graph = torch.export.export(full, (), INPUTS, strict=False).module()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for one, owner, folder, text in (
        (
            pt2mx.convert_pt2e(pt2mx.prepare_pt2e(float_one.graph, attention)),
            model,
            "out",
            "self_attn calls pt2mx.quantize_mx",
        ),
        (convert(full_graph, settings), full, "out", "in torch.float32, loaders of compressed-tensors in bfloat16"),
        (converted, bf16("gpt_oss").model, "out", "which GptOssForCausalLM has not|has no weight"),
        (converted, torch.nn.Linear(2, 2), "out", "not Linear"),
        ("text", model, "out", "not str"),
        (float_one.graph, model, "out", "no weight of the converted model is packed"),
        (converted, model, "taken", "is there already"),
        (converted, model, "taken/file", "is there already"),
        (converted, model, "taken/file/out", "File exists|Not a directory"),
    ):
        with pytest.raises(MXError, match=text):
            save_checkpoint(one, owner, tmp_path / folder)
    with pytest.raises(MXError, match=r"'q_proj' is no module with a packed weight, such as model\.layers\.0"):
        save_checkpoint(converted, model, tmp_path / "out", unpack=["q_proj"])
    mamba = bf16("mamba")
    packed = convert(mamba.graph, {".*conv1d|.*mixer": (FP4, None)})
    with pytest.raises(MXError, match=r"unpack: .*conv1d.weight of a Conv1d cannot be told from its transpose"):
        save_checkpoint(packed, mamba.model, tmp_path / "out", unpack=[".*conv1d"])
    for options, text in (
        ({"unpack": ["["]}, "'\\[' is no regular expression"),
        ({"unpack": ".*_proj"}, "unpack='.*_proj' must be a list"),
        ({"max_shard_size": "five"}, "max_shard_size='five' must be a number of bytes"),
    ):
        with pytest.raises(MXError, match=text):
            save_checkpoint(converted, model, tmp_path / "out", **options)
    with pytest.raises(MXError, match="embedded null byte"):
        save_checkpoint(converted, model, f"{tmp_path}/a\0b")
    both = convert(float_one.graph, {".*q_proj": (FP4, FP4)})
    with pytest.raises(MXError, match=r"inputs of .*q_proj.weight are quantized, which"):
        save_checkpoint(both, model, tmp_path / "out", unpack=[".*q_proj"])
    assert files(tmp_path) == {"taken"}


@pytest.mark.parametrize(("layout", "form"), [(CT, FP8), (CT, "nvfp4"), ("modelopt", "nvfp4")])
def test_experts_that_one_engine_alone_loads(bf16, convert, logits, tmp_path, layout, form):
    float_one = bf16("mixtral")
    converted = convert(float_one.graph, {**OTHERS, ALL: (form, None)})
    report = save_checkpoint(converted, float_one.model, tmp_path / "out", layout)
    assert report.engines["transformers 5.24.0"].startswith("does not load experts") == (layout == CT)
    assert not report.engines["vLLM 0.26.0"].startswith("does not load") and refusals(tmp_path / "out") == []
    assert torch.equal(logits(load_packed_model(tmp_path / "out")), logits(converted))


@pytest.mark.parametrize(("layout", "name"), [(CT, "weight_global_scale"), ("modelopt", "weight_scale_2")])
def test_layers_that_libraries_fuse_are_written_with_one_tensor_scale(bf16, convert, logits, tmp_path, layout, name):
    float_one = bf16("llama")
    form = "fp4_e2m1{16}(e4m3_f32_divisor)" if layout == CT else "nvfp4"
    converted = convert(float_one.graph, {EMBEDDING: None, ALL: (form, None)})
    save_checkpoint(converted, float_one.model, tmp_path / "out", layout)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    values = dict(float_one.model.named_parameters())
    for group in (("self_attn", "q", "k", "v"), ("self_attn", "o"), ("mlp", "gate", "up"), ("mlp", "down")):
        layers = [f"model.layers.0.{group[0]}.{one}_proj" for one in group[1:]]
        amax = torch.stack([values[f"{layer}.weight"].detach().abs().max() for layer in layers])
        expected = pt2mx.tensor_scale_mx(amax, form)
        assert all(stored[f"{layer}.{name}"].reshape(()).equal(expected) for layer in layers)
    assert torch.equal(logits(load_packed_model(tmp_path / "out")), logits(converted))


def test_a_file_holds_each_tensor_for_itself(tmp_path):
    whole = torch.arange(64.0)
    tensors = {"whole": whole, "again": whole, "first": whole[:16], "last": whole[16:]}
    _write_tensors(tensors, tmp_path, max_shard_size=whole.nbytes)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * whole.nbytes
    files = {name: load_file(tmp_path / name) for name in sorted(set(index["weight_map"].values()))}
    assert [list(file) for file in files.values()] == [["whole"], ["again"], ["first", "last"]]
    assert all(torch.equal(tensors[name], values) for file in files.values() for name, values in file.items())


def test_patterns_of_the_same_weights(bf16, convert, tmp_path):
    float_one = bf16("llama")
    converted = convert(float_one.graph, {EMBEDDING: None, ALL: (FP4, None)})
    save_checkpoint(converted, float_one.model, tmp_path / "one", unpack=[".*_proj"])
    save_checkpoint(converted, float_one.model, tmp_path / "two", unpack=[".*_proj", ".*q_proj", ".*_proj"])
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
