import json
import re
import shutil

import pytest
import torch
from compressed_tensors.quantization.lifecycle import forward
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pt2mx
from pt2mx import MXError, convert_checkpoint, save_checkpoint
from pt2mx.pt2e.checkpoints.load import is_mx_checkpoint, load_checkpoint
from pt2mx.pt2e.language.quantize import quantize_language_model, without_activation_matmuls
from pt2mx.pt2e.models.weight_formats import NVFP4
from tests.float_checkpoints import float_checkpoint, load_packed_model, tensors
from tests.language_models import tokenizer_of_bytes, transformers
from tests.pt2e.checkpoints.conftest import IDS, INPUTS

FP4, FP8 = "mxfp4{32}(even,even)", "mxfp8_e4m3{32}(rceil)"
OTHERS = {".*embed_tokens": None, ".*mlp.gate": None, ".*router": None}

pytestmark = pytest.mark.filterwarnings("ignore:the setting module_name_regex")


def formats(report, unknown=()):
    """The specs of a report, without scale modes and roundings of the roles in `unknown`."""
    specs = [(operand.role, operand.spec) for row in report for operand in row.operands]
    return [(role, spec and (spec.partition("(")[0] if role in unknown else spec)) for role, spec in specs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {**OTHERS, ".*": (FP4, FP4)}),
        ("mixtral", {**OTHERS, ".*": (FP4, None)}),
        ("gpt_oss", {".*experts": (FP4, None)}),
    ],
)
def test_the_program_is_that_of_the_converted_model(bf16, quantizer, logits, tmp_path, family, settings):
    model = bf16(family).model
    quantized = quantize_language_model(model, quantizer(settings), tokenizer=tokenizer_of_bytes())
    save_checkpoint(quantized, model, tmp_path / "out")
    stages = []
    loaded = load_checkpoint(tmp_path / "out", stage=stages.append)
    assert stages == ["export"] and loaded.tokenizer is not None and loaded.generation_config.pad_token_id == 257
    expected, actual = ({n: t for n, t in one.program.state_dict.items() if "lifted" not in n and "inv_freq" not in n}
                     for one in (quantized, loaded))  # fmt: skip
    assert expected.keys() == actual.keys() and all(torch.equal(expected[name], actual[name]) for name in expected)
    assert torch.equal(logits(loaded), logits(quantized))
    assert torch.equal(logits(load_packed_model(tmp_path / "out"), mask=True), logits(quantized))
    reports = [pt2mx.quantization_report(one.program.module()).operators for one in (quantized, loaded)]
    # a checkpoint holds codes, not the modes that chose them
    assert [formats(report, unknown=("weight",)) for report in reports] == [formats(reports[1])] * 2
    save_checkpoint(loaded, model, tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()


@pytest.mark.slow
def test_generation(bf16, convert, tmp_path):
    float_one = bf16("qwen2")
    save_checkpoint(convert(float_one.graph, {".*_proj": (FP4, None)}), float_one.model, tmp_path / "out")
    loaded = load_checkpoint(tmp_path / "out")
    prompt = torch.tensor([[1, 2, 3]])
    tokens = loaded.generate(prompt, max_new_tokens=5, do_sample=False)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(tokens, stock.generate(prompt, max_new_tokens=5, do_sample=False))
    loaded.save_pretrained(tmp_path / "quantized")
    again = pt2mx.LanguageModel.from_pretrained(tmp_path / "quantized")
    assert torch.equal(again.generate(prompt, max_new_tokens=5, do_sample=False), tokens)


@pytest.fixture
def checkpoint(bf16, convert, tmp_path):
    """Make a checkpoint in a layout; a function changes its tensors and its quantization_config."""

    def make(change, layout="compressed-tensors", specs=(FP8, None)):
        float_one, folder = bf16("llama"), tmp_path / f"checkpoint of {getattr(change, '__name__', '')}"
        save_checkpoint(convert(float_one.graph, {".*q_proj": specs}), float_one.model, folder, layout)
        tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        change(tensors, config["quantization_config"])
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


Q = "model.layers.0.self_attn.q_proj.weight"


def _other_grid(tensors, config):
    tensors[f"{Q}_scale_inv"] = torch.ones(3, 1, dtype=torch.uint8)


def _integer_scales(tensors, config):
    tensors[f"{Q}_scale_inv"] = torch.ones(64, 2, dtype=torch.int32)


def _fewer_rows(tensors, config):
    tensors.update({name: tensors[name][:-1].clone() for name in (Q, f"{Q}_scale")})


def _e8m0_scales(tensors, config):
    tensors[f"{Q}_scale_inv"] = tensors[f"{Q}_scale_inv"].view(torch.float8_e8m0fnu)
    config["quant_method"] = "fp8"


def test_scales_of_their_own_dtype(checkpoint, logits):
    plain = logits(load_packed_model(checkpoint(lambda tensors, config: None, "fp8")))
    assert torch.equal(logits(load_packed_model(checkpoint(_e8m0_scales, "fp8"))), plain)


@pytest.mark.parametrize(
    ("layout", "change", "text"),
    [
        ("fp8", _other_grid, "codes of shape (64, 64) and scales of shape (3, 1): no block of fp8_e4m3"),
        ("fp8", _integer_scales, "q_proj.weight_scale_inv is torch.int32"),
        ("compressed-tensors", lambda tensors, config: tensors.pop(Q), f"the checkpoint holds no {Q}"),
        ("compressed-tensors", lambda tensors, config: tensors.pop("model.norm.weight"), "missing keys of the"),
        ("compressed-tensors", _fewer_rows, f"has {Q} of shape (63, 64), its config.json of (64, 64)"),
        ("compressed-tensors", lambda tensors, config: config.update(config_groups={}), "no codes of a LlamaForC"),
        ("compressed-tensors", lambda tensors, config: config.update(quant_method="awq"), "'awq' of the checkpoint is"),
        (
            "compressed-tensors",
            lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(group_size=16),
            "weights of group_0 in config_groups are not MX, but have group_size 16",
        ),
    ],
)  # fmt: skip
def test_what_is_no_mx_checkpoint(checkpoint, layout, change, text):
    with pytest.raises(MXError, match=re.escape(text)):
        load_checkpoint(checkpoint(change, layout))


def test_folders_that_hold_none(bf16, tmp_path):
    folder = bf16("llama").folder
    assert not is_mx_checkpoint(folder) and not is_mx_checkpoint(tmp_path)
    with pytest.raises(MXError, match="holds a checkpoint in high precision: quantize it"):
        load_checkpoint(folder)
    with pytest.raises(MXError, match=r"holds no config\.json"):
        load_checkpoint(tmp_path)
    with pytest.raises(MXError, match="3 is no path"):
        load_checkpoint(3)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MXError, match="cannot read"):
        is_mx_checkpoint(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP8", "group_size": 32}}')
    assert is_mx_checkpoint(tmp_path)
    with pytest.raises(MXError, match=r"holds neither model\.safetensors nor"):
        load_checkpoint(tmp_path)


class FloatsMade(TorchDispatchMode):
    """Count the bytes of float tensors that operators make on the CPU."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.is_cpu:
                storage = tensor.untyped_storage()
                self.bytes += storage.nbytes() * (storage.data_ptr() not in inputs)
        return result


def test_no_float_copy_is_made(bf16, convert, tmp_path):
    """`tests.benchmarks.memory --codes` measures the resident memory."""
    float_one = bf16("llama")
    save_checkpoint(convert(float_one.graph, {".*embed_tokens": None, ".*": (FP4, None)}), float_one.model, tmp_path)
    with FloatsMade() as made:
        model = load_packed_model(tmp_path)
        loaded = made.bytes
        model(torch.arange(3)[None])
    values = sum(parameter.nbytes for parameter in float_one.model.parameters())
    embedding = float_one.model.model.embed_tokens.weight.nbytes
    assert loaded < 1.1 * embedding < 0.5 * values  # norms and buffers of RoPE are small
    assert made.bytes > values - embedding  # each weight is decoded when it is read


LAYER = "model.layers.0"
DOWN = f"{LAYER}.mlp.down_proj.weight"
FORM = "fp4_e2m1{16}"


def stock(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def _calibrated(folder, change=lambda tensors: None, method="modelopt", **fields):
    """Add the tensor scales of inputs to a checkpoint of one file."""
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    held = load_file(path)
    for name in [name for name in held if name.endswith("weight_scale_2")]:
        held[name.replace("weight_scale_2", "input_scale")] = torch.tensor(0.01)
    change(held)
    save_file(held, path, {"format": "pt"})
    config["quantization_config"].update(quant_algo="NVFP4", **fields)
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@torch.no_grad()
def test_inputs_of_modelopt(in_format, logits, tmp_path):
    """Inputs are quantized with the tensor scale in the file, after `pre_quant_scale` multiplies them."""
    in_format(float_checkpoint("llama", tmp_path / "float", shard="1GB"), tmp_path / "nv", NVFP4, "modelopt")
    pre = torch.rand(96).bfloat16() + 0.5
    name = DOWN.removesuffix("weight") + "pre_quant_scale"
    _calibrated(tmp_path / "nv", lambda held: held.update({name: pre[: held[DOWN].shape[1] * 2].clone()}))
    model = load_packed_model(tmp_path / "nv")
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, layer.in_features).bfloat16()
    scaled = x * pre[: layer.in_features]
    expected = pt2mx.fake_quantize_mx(scaled, NVFP4, tensor_scale=torch.tensor(0.01)) @ layer.weight.T
    assert torch.equal(layer(x), expected)
    program = load_checkpoint(tmp_path / "nv")
    assert torch.equal(logits(program), logits(model, mask=True))
    with pytest.raises(MXError, match="multiplies inputs, which compressed-tensors has no place for"):
        convert_checkpoint(tmp_path / "nv", tmp_path / "ct")
    float_one = stock(tmp_path / "float")
    with pytest.raises(MXError, match=r"down_proj multiplies its inputs by factors .* compressed-tensors has no place"):
        save_checkpoint(program, float_one, tmp_path / "again", "compressed-tensors")
    save_checkpoint(program, float_one, tmp_path / "again", "modelopt")
    convert_checkpoint(tmp_path / "nv", tmp_path / "copy", layout="modelopt")
    for folder in ("again", "copy"):
        written, first = tensors(tmp_path / folder), tensors(tmp_path / "nv")
        assert written.keys() == first.keys() and all(torch.equal(written[name], first[name]) for name in first)
        config = json.loads((tmp_path / folder / "hf_quant_config.json").read_text())["quantization"]
        assert (config["quant_algo"], config["pre_quant_scale"], config["group_size"]) == ("NVFP4_AWQ", True, 16)
        assert torch.equal(logits(load_packed_model(tmp_path / folder)), logits(load_packed_model(tmp_path / "nv")))


def test_inputs_with_tensor_scales_go_from_file_to_file(in_format, tmp_path):
    source = float_checkpoint("llama", tmp_path / "float", shard="1GB")
    in_format(source, tmp_path / "nv", NVFP4, "modelopt")
    _calibrated(tmp_path / "nv")
    convert_checkpoint(tmp_path / "nv", tmp_path / "ct")
    written = tensors(tmp_path / "ct")
    assert written[f"{LAYER}.mlp.up_proj.input_global_scale"].equal(torch.tensor(0.01).reciprocal().reshape(1))
    group = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] == "local"
    convert_checkpoint(tmp_path / "ct", tmp_path / "back", layout="modelopt")
    back, first = tensors(tmp_path / "back"), tensors(tmp_path / "nv")
    assert back.keys() == first.keys() and all(back[name].shape == first[name].shape for name in first)


@pytest.mark.slow
def test_inputs_with_tensor_scales_through_a_program(in_format, tmp_path):
    source = float_checkpoint("llama", tmp_path / "float", shard="1GB")
    in_format(source, tmp_path / "nv", NVFP4, "modelopt")
    _calibrated(tmp_path / "nv")
    save_checkpoint(load_checkpoint(tmp_path / "nv"), stock(source), tmp_path / "again")  # only modelopt holds them
    again, first = tensors(tmp_path / "again"), tensors(tmp_path / "nv")
    assert again.keys() == first.keys() and all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "holds no .*down_proj.input_scale, which changes its inputs"),
        (torch.tensor(float("nan")), "down_proj.input_scale is nan"),
        (torch.tensor(-1.0), "down_proj.input_scale is -1"),
    ],
)
def test_impossible_scales_of_inputs(in_format, tmp_path, value, text):
    in_format(float_checkpoint("llama", tmp_path / "float", shard="1GB"), tmp_path / "nv", NVFP4, "modelopt")
    name = DOWN.removesuffix("weight") + "input_scale"
    _calibrated(tmp_path / "nv", lambda held: held.pop(name) if value is None else held.update({name: value}))
    with pytest.raises(MXError, match=text):
        load_checkpoint(tmp_path / "nv")


def test_weights_alone(in_format, tmp_path):
    """NVFP4 whose groups quantize no inputs is W4A16_NVFP4, and holds no scales of inputs. So says vLLM's pull request
    54427, merged in August 2026; vLLM was not run."""
    in_format(float_checkpoint("llama", tmp_path / "float", shard="1GB"), tmp_path / "nv", NVFP4, "modelopt")
    path = tmp_path / "nv" / "config.json"
    config = json.loads(path.read_text())
    expected = load_packed_model(tmp_path / "nv")
    assert config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
    for groups in ({"group_0": {"input_activations": None}}, {"group_0": {}, "group_1": {"input_activations": None}}):
        config["quantization_config"].update(quant_algo="NVFP4", config_groups=groups)
        path.write_text(json.dumps(config))
        loaded = load_packed_model(tmp_path / "nv")
        assert torch.equal(loaded(IDS).logits, expected(IDS).logits)
        convert_checkpoint(tmp_path / "nv", tmp_path / f"of {len(groups)}", layout="modelopt")
        written = json.loads((tmp_path / f"of {len(groups)}" / "config.json").read_text())
        assert written["quantization_config"]["quant_algo"] == "W4A16_NVFP4"


@pytest.mark.slow
@torch.no_grad()
def test_inputs_of_compressed_tensors(in_format, logits, tmp_path, monkeypatch):
    """Its own functions in float32 give equal logits. It divides in bfloat16, where a scale may round twice."""
    in_format(float_checkpoint("llama", tmp_path / "float", shard="1GB"), tmp_path / "nv", NVFP4, "modelopt")
    _calibrated(tmp_path / "nv")
    convert_checkpoint(tmp_path / "nv", tmp_path / "ct")
    theirs, ours = stock(tmp_path / "ct"), load_packed_model(tmp_path / "ct")
    layer, own = (model.model.layers[0].mlp.up_proj for model in (theirs, ours))
    x = torch.randn(1000, 64).bfloat16()
    arguments = layer.quantization_scheme.input_activations
    narrow, wide = (
        compute_dynamic_scales_and_zp(y, arguments, layer, global_scale=layer.input_global_scale)[0].float()
        for y in (x, x.float())
    )
    assert 0.9 < (narrow == wide).float().mean() < 1
    logits(theirs)  # the first call decompresses the weights
    original = forward.forward_quantize
    monkeypatch.setattr(forward, "forward_quantize", lambda module, x, *args: original(module, x.float(), *args).to(x))
    assert torch.equal(layer(x), own(x)) and torch.equal(logits(theirs), logits(ours))


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.flatten().view(torch.uint8).tolist()


@pytest.mark.compiled_except("compressed-tensors-nvfp4")
@torch.no_grad()
@pytest.mark.parametrize(
    ("layout", "inputs"), [("compressed-tensors", NVFP4), ("modelopt", f"{FORM}(nearest_flush,e4m3_f32_divisor)")]
)
def test_inputs_of_the_other_layout(bf16, quantizer, tmp_path, layout, inputs):
    """A program of ModelOpt's NVFP4 goes straight to compressed-tensors, as through a checkpoint of its own layout, and
    the other way round; a scale mode that no library has does not."""
    own = {"compressed-tensors": "modelopt", "modelopt": "compressed-tensors"}[layout]
    float_one = bf16("llama")

    def program(form):
        settings = {".*embed_tokens": None, ".*": (NVFP4, form)}
        prepared = pt2mx.prepare_pt2e(float_one.graph, without_activation_matmuls(quantizer(settings)))
        prepared(**INPUTS)
        return pt2mx.convert_pt2e(prepared)

    converted = program(inputs)
    report = save_checkpoint(converted, float_one.model, tmp_path / "straight", layout)
    assert len(report.changes) == 1 and f"which is how libraries that load {layout} quantize" in report.changes[0]
    assert save_checkpoint(converted, float_one.model, tmp_path / "own", own).changes == []
    convert_checkpoint(tmp_path / "own", tmp_path / "through", layout=layout)
    one, other = tensors(tmp_path / "straight"), tensors(tmp_path / "through")
    assert one.keys() == other.keys() and any("input" in name for name in one)
    assert all(bits(one[name]) == bits(other[name]) for name in one)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("straight", "through")]
    assert len({json.dumps(config["quantization_config"]) for config in configs}) == 1
    by_mse = program({NVFP4: f"{NVFP4}(mse)"}.get(inputs, inputs.replace("nearest_flush", "mse")))
    with pytest.raises(MXError, match=r"cannot say that inputs of .* are"):
        save_checkpoint(by_mse, float_one.model, tmp_path / "mode", layout)


@torch.no_grad()
def test_inputs_that_the_flow_calibrates(bf16, quantizer, logits, tmp_path, monkeypatch):
    """Both layouts keep codes, scales and the logits; compressed-tensors' decompressor gives equal weights."""
    inputs = {"compressed-tensors": f"{FORM}(nearest_flush,e4m3_f32_divisor)", "modelopt": NVFP4}
    original = forward.forward_quantize
    monkeypatch.setattr(forward, "forward_quantize", lambda module, x, *args: original(module, x.float(), *args).to(x))
    for layout, other in zip(inputs, reversed(inputs), strict=True):
        float_one, settings = bf16("llama"), {".*embed_tokens": None, ".*": (NVFP4, inputs[layout])}
        prepared = pt2mx.prepare_pt2e(float_one.graph, without_activation_matmuls(quantizer(settings)))
        prepared(**INPUTS)
        converted = pt2mx.convert_pt2e(prepared)
        save_checkpoint(converted, float_one.model, tmp_path / layout, layout)
        model = load_packed_model(tmp_path / layout)
        assert torch.equal(logits(model), logits(converted))
        if layout == "compressed-tensors":
            theirs = stock(tmp_path / layout)
            assert torch.equal(logits(theirs), logits(converted))  # decompresses the weights
            for name in (f"{LAYER}.self_attn.{n}_proj" for n in "qkvo"):
                assert torch.equal(theirs.get_submodule(name).weight, model.get_submodule(name).weight)
        convert_checkpoint(tmp_path / layout, tmp_path / f"of {layout}", layout=other)
        codes = []
        for folder in (layout, f"of {layout}"):
            of_file = tensors(tmp_path / folder).items()
            codes.append({n.removesuffix("_packed"): t for n, t in of_file if t.dtype == torch.uint8})
        assert codes[0].keys() == codes[1].keys() and len(codes[0]) == 8
        assert all(torch.equal(codes[1][name], t) for name, t in codes[0].items())
