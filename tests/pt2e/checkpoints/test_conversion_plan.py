import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer, convert_checkpoint
from pt2mx.pt2e.checkpoints.configs import read_config
from pt2mx.pt2e.models.checkpoint_files import CheckpointTensors
from pt2mx.pt2e.models.layouts import LAYOUTS
from pt2mx.pt2e.models.weight_formats import format_of
from pt2mx.pt2e.quantizer import recipe
from tests.float_checkpoints import float_checkpoint, load_packed_model, of_weights, tensors
from tests.language_models import tiny_decoder, transformers

_WEIGHT_ONLY = "mxfp4_weight_only"


def test_what_a_recipe_leaves_out(llama, tmp_path):
    quantizer = MXQuantizer.from_recipe(_WEIGHT_ONLY).set_module_name("lm_head", None)
    quantizer.set_module_name_regex(r".*\.down_proj", MXQuantizationConfig(weight="mxfp8"))
    report = convert_checkpoint(llama, tmp_path / "out", quantizer)
    assert report.left["lm_head.weight"] == "excluded by module_name 'lm_head'"
    assert report.quantized["model.layers.1.mlp.down_proj.weight"] == "mxfp8_e4m3{32}"
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"] and config["format"] == "mixed-precision"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded(torch.arange(40)[None]).logits.isfinite().all()


def test_names_that_transformers_changes(tmp_path):
    """Make an old checkpoint of GPT-2: without the prefix of its base model, and with weights (in, out)."""
    float_checkpoint("gptj", tmp_path / "float")
    folder = tmp_path / "float"
    for path in folder.glob("*.safetensors"):
        state = load_file(path)
        save_file({name.removeprefix("transformer."): value for name, value in state.items()}, path, {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name.removeprefix("transformer."): shard for name, shard in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    report = convert_checkpoint(folder, tmp_path / "out")
    assert "h.0.mlp.fc_in.weight" in report.quantized
    with pytest.raises(MXError, match=r"no tensor of the checkpoint would be quantized.*keep layers of type Conv1D"):
        convert_checkpoint(float_checkpoint("gpt2", tmp_path / "gpt2"), tmp_path / "gpt2_out")


def test_a_tied_head_stays(tmp_path):
    model = tiny_decoder("gemma2").bfloat16()
    model.save_pretrained(tmp_path / "float")
    report = convert_checkpoint(tmp_path / "float", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"]
    assert "model.embed_tokens.weight" in report.left
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(loaded.lm_head.weight, model.model.embed_tokens.weight)


def test_experts(tmp_path):
    float_checkpoint("gpt_oss", tmp_path / "float")
    report = convert_checkpoint(tmp_path / "float", tmp_path / "out", layout="mxfp4")
    assert len(report.quantized) == 4 and all("experts" in name for name in report.quantized)
    before, after = tensors(tmp_path / "float"), tensors(tmp_path / "out")
    name = "model.layers.1.mlp.experts.down_proj"
    scale, data = pt2mx.quantize_mx(before[name].mT, "mxfp4(even,even)")
    assert torch.equal(after[f"{name}_blocks"].flatten(-2), data) and after[f"{name}_blocks"].dim() == 4
    assert torch.equal(after[f"{name}_scales"], scale)
    assert torch.equal(after[f"{name}_bias"], before[f"{name}_bias"])
    report = convert_checkpoint(tmp_path / "float", tmp_path / "linear")
    assert report.left[name] == "compressed-tensors has no place for experts in one tensor"
    assert len(report.quantized) == 9


def test_experts_in_one_tensor_stay(bf16, logits, tmp_path):
    report = convert_checkpoint(bf16("granitemoe").folder, tmp_path / "out")
    name = "model.layers.0.block_sparse_moe.input_linear.weight"
    assert (
        report.left[name] == "compressed-tensors has no place for experts in one tensor" and len(report.quantized) == 5
    )
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(stock), logits(load_packed_model(tmp_path / "out")))


def test_experts_that_readers_take_for_quantized(tmp_path):
    float_checkpoint("mixtral", tmp_path / "float")
    quantizer = MXQuantizer.from_recipe(_WEIGHT_ONLY).set_module_name("model.layers.1.mlp.experts", None)
    with pytest.raises(MXError, match=r"reads all experts in one format"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out", quantizer)


@pytest.mark.parametrize(
    ("chosen", "options", "message"),
    [
        ("mxint8", {}, "compressed-tensors cannot hold .*_proj.weight in int8"),
        ("mxfp8", {"layout": "fp8"}, "fp8 holds weights alone: leave the inputs of"),
        (of_weights("mxfp4{16}"), {}, r"cannot hold .* in mxfp4_e2m1\{16\}: its blocks have 32 values"),
        ("mxfp4_decoder", {}, "which is not applied to weights"),
        ("no_such_recipe", {}, "no recipe 'no_such_recipe'"),
        (_WEIGHT_ONLY, {"layout": "ggml"}, "unknown layout 'ggml'"),
        (_WEIGHT_ONLY, {"layout": "mxfp4"}, "no tensor of the checkpoint would be quantized .*mxfp4 has experts alone"),
        (_WEIGHT_ONLY, {"dtype": "int8"}, "dtype='int8' must be"),
        (_WEIGHT_ONLY, {"dtype": "no_dtype"}, "dtype='no_dtype' must be"),
        (_WEIGHT_ONLY, {"jobs": 0}, "jobs=0 must be"),
        (MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4", output="mxfp8")), {}, "a bias or an output"),
    ],
)
def test_settings_that_no_checkpoint_holds(llama, tmp_path, chosen, options, message):
    with pytest.raises(MXError, match=message):
        convert_checkpoint(llama, tmp_path / "out", chosen, **options)
    assert not (tmp_path / "out").exists()


_CT, _QUARK, _MODELOPT = "compressed-tensors", "quark", "modelopt"
#: shipped recipe of formats alone -> the layouts that have them, each with the inputs that it states
_SHIPPED = {
    "mxfp8": {_CT: "mxfp8(rceil)", _QUARK: "mxfp8", _MODELOPT: "mxfp8(rceil)"},
    "mxfp6": {_CT: "mxfp6(even)", _QUARK: "mxfp6"},
    "mxfp6_weights_mxfp8_activations": {_CT: "mxfp8(rceil)", _QUARK: "mxfp8"},
    "mxfp4": {_CT: "mxfp4(even)", _QUARK: "mxfp4(even)"},
    "mxfp4_first_last_mxfp8": {_CT: "mxfp4(even)", _QUARK: "mxfp4(even)"},
    "mxfp4_weights_mxfp8_activations": {_CT: "mxfp8(rceil)", _QUARK: "mxfp8"},
    "mxfp4_weight_only": {_CT: None, _QUARK: None},
    "nvfp4_weight_only": {_CT: None, _MODELOPT: None},
    "nvfp4": {},  # its inputs are calibrated
    "mxint8": {},
    "asr_best": {},
}


def test_each_shipped_recipe_is_tried():
    names = {name for name in recipe.names() if not MXQuantizer.from_recipe(name).algorithms}
    assert names == _SHIPPED.keys()


@pytest.mark.diagonal
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name, layouts in _SHIPPED.items() for layout in layouts]
)
def test_shipped_recipes(tmp_path, family, name, layout):
    """Weights have the codes of the recipe, in any scale mode. Inputs have the mode of the layout, and the report says
    so where that is not the recipe's."""
    float_checkpoint(family, tmp_path / "float")
    report = convert_checkpoint(tmp_path / "float", tmp_path / "out", name, layout=layout)
    written, config = tensors(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text())
    module = "model.layers.0.self_attn.o_proj"
    stated = read_config(config["quantization_config"]).of(module)
    inputs = _SHIPPED[name][layout]
    assert stated.inputs == (None if inputs is None else pt2mx.parse(inputs))
    asked = MXQuantizer.from_recipe(name).to_dict()[""].get("activation")
    changed = asked is not None and pt2mx.parse(asked) != stated.inputs
    line = f"inputs in {asked} are stated as {stated.inputs}, which is how libraries that load {layout} quantize them"
    assert changed == (line in report.changes)
    experts = [one for one in report.quantized if "experts" in one]
    assert bool(experts) == (family == "mixtral" and (layout, name) != (_MODELOPT, "mxfp8"))
    assert bool(experts and inputs is not None) == any("inputs of experts" in line for line in report.changes)
    assert experts or all("which experts have" in why for one, why in report.left.items() if "experts" in one)
    spec = pt2mx.parse(report.quantized[f"{module}.weight"])
    if not spec.scale_format.tensor:  # a tensor scale is shared with other weights
        scale, data = pt2mx.quantize_mx(tensors(tmp_path / "float")[f"{module}.weight"], spec)
        names = LAYOUTS[layout].names(f"{module}.weight", format_of(spec))
        codes, scales = (written[one].view(torch.uint8) for one in names)
        assert torch.equal(codes, data) and torch.equal(scales, scale)
        assert str(spec) == MXQuantizer.from_recipe(name).to_dict()[""]["weight"]


def write(text, name="config.json"):
    return lambda folder: (folder / name).write_text(text)


def index(weight_map):
    return write(json.dumps({"weight_map": weight_map}), "model.safetensors.index.json")


def reshape(folder):
    path = next(path for path in folder.glob("*.safetensors") if "lm_head.weight" in load_file(path))
    save_file({**load_file(path), "lm_head.weight": torch.ones(10, 32)}, path)


def cut(size):
    return lambda folder: os.truncate(sorted(folder.glob("*.safetensors"))[1], size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (write("{"), "cannot read"),
        (write("[]"), "holds no JSON object"),
        (write('{"architectures": ["Net"]}'), "the architecture 'Net', which transformers has not"),
        (write('{"quantization_config": {"quant_method": "awq"}}'), "quant_method 'awq' of the checkpoint is none of"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "holds neither model.safetensors nor"),
        (lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), "which is not there: fetch"),
        (write('{"quantization_config": 3}'), "its quantization_config 3 is no JSON object"),
        (write("{}", "model.safetensors.index.json"), "it has no weight_map"),
        (index(["a"]), "it has no weight_map"),
        (index({"a": 3}), "has a in 3, which is no file of its folder"),
        (index({"a": "../model.safetensors"}), "has a in '../model.safetensors', which is no file of its folder"),
        (reshape, r"has lm_head.weight of shape \(10, 32\), its config.json of \(300, 64\)"),
        (cut(5000), "no whole file of safetensors"),
        (cut(4), "no whole file of safetensors"),
    ],
)
def test_bad_checkpoints(llama, tmp_path, damage, message):
    damage(llama)
    with pytest.raises(MXError, match=message):
        convert_checkpoint(llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def without(folder, name):
    """Remove a tensor from the files of a checkpoint, but not from its index."""
    path = next(path for path in folder.glob("*.safetensors") if name in load_file(path))
    save_file({own: tensor for own, tensor in load_file(path).items() if own != name}, path, {"format": "pt"})
    return path


@pytest.mark.compiled_except("mixtral")
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_every_tensor_that_is_missing_is_an_error_by_its_name(family, tmp_path):
    """A missing tensor is an error for any shape, with or without an index, and also where transformers merges it."""
    folder = float_checkpoint(family, tmp_path / "float", shard="1GB")
    file = folder / "model.safetensors"
    whole, kinds = load_file(file), {}
    for name in whole:
        kinds.setdefault(re.sub(r"\d+", "*", name), name)
    assert len(kinds) >= 11
    for name in kinds.values():
        without(folder, name)
        with pytest.raises(MXError, match=f"lacks {re.escape(name)}, which the .*ForCausalLM of its config.json has"):
            convert_checkpoint(folder, tmp_path / "out")
        index(dict.fromkeys(whole, file.name))(folder)
        with pytest.raises(MXError, match=f"has {re.escape(name)} in 'model.safetensors', which lacks it"):
            convert_checkpoint(folder, tmp_path / "out")
        with pytest.raises(MXError, match="which lacks it"):
            CheckpointTensors(folder)
        (folder / "model.safetensors.index.json").unlink()
        save_file(whole, file, {"format": "pt"})
    assert not (tmp_path / "out").exists()
    assert set(convert_checkpoint(folder, tmp_path / "out").quantized) <= whole.keys()


def test_a_tensor_of_two_shards(llama, tmp_path):
    first, second = sorted(llama.glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: load_file(first)[name]}, second, {"format": "pt"})
    with pytest.raises(MXError, match=f"{name} is in '{first.name}' and in '{second.name}'.*of two checkpoints"):
        convert_checkpoint(llama, tmp_path / "out")


def test_what_the_index_and_the_model_do_not_name_is_kept(llama, tmp_path):
    path = sorted(llama.glob("*.safetensors"))[0]
    save_file({**load_file(path), "extra.scale": torch.ones(3)}, path, {"format": "pt"})
    convert_checkpoint(llama, tmp_path / "out")
    assert torch.equal(tensors(tmp_path / "out")["extra.scale"], torch.ones(3))
    written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert written.keys() == tensors(tmp_path / "out").keys() and written["extra.scale"] == path.name
