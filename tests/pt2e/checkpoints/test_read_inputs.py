"""Inputs that a checkpoint quantizes or multiplies: NVFP4 with a calibrated tensor scale, and factors of AWQ."""

import json

import pytest
import torch
from compressed_tensors.quantization.lifecycle import forward
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.checkpoints.convert_files import convert_checkpoint
from pt2mx.pt2e.checkpoints.load import load_checkpoint, load_packed_model
from pt2mx.pt2e.checkpoints.save import save_checkpoint
from pt2mx.pt2e.language.quantize import without_activation_matmuls
from pt2mx.pt2e.models.weight_formats import NVFP4
from tests.float_checkpoints import float_checkpoint, tensors
from tests.language_models import transformers
from tests.pt2e.checkpoints.conftest import IDS, INPUTS

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
