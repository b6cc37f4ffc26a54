"""The share of a checkpoint that a program holds, and the parts that it may leave out."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import pt2mx
from pt2mx import MXError, MXQuantizer, PT2MXConfig
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.cli.float_model import export_loaded
from pt2mx.pt2e.models.checkpoint_files import entries_in, files_of
from pt2mx.pt2e.models.coverage import CheckpointValues, tensors_read
from pt2mx.pt2e.models.float_models import load_model
from tests.float_checkpoints import float_checkpoint, of_weights
from tests.language_models import FAMILIES, tiny_decoder, transformers
from tests.vision_language_models import vision_language_checkpoint

_RECIPE = "mxfp4_weight_only"


def values_of(model, folder):
    return CheckpointValues(model, entries_in(files_of(folder)))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_a_decoder_is_held(family, tmp_path):
    model = tiny_decoder(family)
    model.save_pretrained(tmp_path)
    coverage = values_of(model, tmp_path).held_by()
    parameters = dict(model.named_parameters())
    assert coverage.held == coverage.values == sum(parameter.numel() for parameter in parameters.values())
    assert not coverage.lost and str(coverage) == f"100% of the checkpoint's {coverage.values:,} values"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_is_left_out_is_lost_and_a_head_is_not(family):
    """Each layer counts, and each tensor outside the layers, by its name in the model."""
    model = tiny_decoder(family)
    values, names = CheckpointValues(model), {name for name, _ in model.named_parameters()}
    layers = {".".join(name.split(".")[: name.split(".").index("1") + 1]) for name in names if ".1." in name}
    assert layers
    for layer in layers:
        coverage = values.held_by({name for name in names if not name.startswith(f"{layer}.")})
        assert coverage.lost and coverage.held < coverage.values
        with pytest.raises(MXError, match=r"^the program would hold \d+\.\d% of the checkpoint's .* --allow-partial"):
            coverage.check(None, False)
        coverage.check(None, True)
    assert not values.held_by({name for name in names if "norm" not in name}).lost


@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "gemma3"])
def test_a_vision_tower_is_not_left_out_silently(kind, tmp_path):
    model, tower = vision_language_checkpoint(kind, tmp_path)
    parameters = list(model.parameters())
    text = {id(one) for part in (model.model.language_model, model.lm_head) for one in part.parameters()}
    loaded = load_model(f"hf:{tmp_path}")
    coverage = loaded.values.held_by(tensors_read(export_loaded(loaded)))
    assert coverage.values == sum(parameter.numel() for parameter in parameters)
    assert coverage.held == sum(parameter.numel() for parameter in parameters if id(parameter) in text)
    with pytest.raises(
        MXError, match=rf"would hold .*{tower} 0%.* give --part language_model \(part='language_model'\)"
    ):
        coverage.check(None, False)
    with pytest.raises(MXError, match=f"give a model of {tower} alone with inputs that reach it"):
        coverage.check(tower, False)
    with pytest.raises(MXError, match="no top-level module 'no_module': did you mean 'language_model'"):
        coverage.check("no_module", True)
    coverage.check("language_model", False)
    coverage.check(None, True)


@pytest.mark.compiled
def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    vision_language_checkpoint("llava", tmp_path / "vlm")
    command = ["recipes", "check", _RECIPE, "--model", "hf:vlm"]
    assert main(command) == 0
    assert re.search(r"the program holds \d+\.\d% of the checkpoint's [\d,]+ values: ", capsys.readouterr().err)
    command = ["quantize", "--recipe", _RECIPE, "--model", "hf:vlm", "--output", "out.pt2", "--calibration", "none"]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "vision_tower 0%" in err and "--allow-partial" in err and err.count("pt2mx: error:") == 1
    assert main([*command, "--part", "language_model", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    actual, report = result["checkpoint"], result["report"]
    assert actual["modules"]["vision_tower"]["held"] == 0 < actual["held"] < actual["values"]
    assert (
        actual["held"] <= report["values"] < actual["held"] + 100
    )  # the program has computed buffers, and lacks the tower
    assert report["bytes_before"] == 4 * report["values"]
    assert main(["compare", "minilm", "--allow-partial"]) == 2
    assert "--allow-partial is for checkpoints (hf:NAME), and 'minilm' is none" in capsys.readouterr().err


@pytest.mark.compiled
def test_a_language_model_with_a_tower(tmp_path):
    """The same in Python, and with a tower that transformers does not load."""
    model, tower = vision_language_checkpoint("gemma3", tmp_path / "vlm")
    quantized = pt2mx.quantize_language_model(model, MXQuantizer.from_recipe(_RECIPE), part="language_model")
    report, held = pt2mx.quantization_report(quantized.program.module()), quantized.coverage.held
    assert held <= report.values < held + 100 < sum(parameter.numel() for parameter in model.parameters())
    text = transformers.Gemma3ForCausalLM(model.config.text_config)
    state = load_file(tmp_path / "vlm" / "model.safetensors")
    names = {name.replace("model.", f"{tower}.", 1): tensor for name, tensor in text.state_dict().items()}
    save_file({**state, **{name: tensor.clone() for name, tensor in names.items()}}, tmp_path / "more.safetensors")
    coverage = CheckpointValues(text, entries_in([tmp_path / "more.safetensors"])).held_by()
    assert tower in coverage.lost


@pytest.fixture
def llama(tmp_path):
    """The folder of a checkpoint, and a function that adds tensors of 64 values each."""
    tiny_decoder("llama").save_pretrained(tmp_path / "llama")
    file = tmp_path / "llama" / "model.safetensors"

    def add(*names):
        save_file({**load_file(file), **{name: torch.ones(64) for name in names}}, file, {"format": "pt"})
        return tmp_path / "llama"

    return add


#: tensors of a checkpoint that a LlamaForCausalLM of two layers lacks -> True where they may be left out
EXTRA = {
    "score.weight": True,
    "classifier.dense.weight": True,
    "classifier.0.weight": True,
    "model.layers.0.self_attn.rotary_emb.inv_freq": True,
    "mtp.layers.0.mlp.up_proj.weight": True,
    "model.layers.2.mlp.up_proj.weight": False,
    "model.layers.0.mlp.up_proj.bias": False,
    "model.norm.bias": False,
    "vision_tower.layers.0.mlp.fc1.weight": False,
    "model.visual.blocks.0.norm.weight": False,
}


@pytest.mark.parametrize(("name", "fits"), EXTRA.items())
def test_what_a_model_has_no_place_for(name, fits, llama):
    folder = llama(name)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    coverage = values_of(model, folder).held_by()
    assert coverage.values - coverage.held == 64
    assert (not coverage.lost) == fits
    assert fits or [name] in coverage.lost.values()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_masks_and_indices_are_no_weights(dtype, llama):
    """Checkpoints that are years old hold the masks of attention."""
    folder = llama()
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.mask"] = torch.ones(8, 8, dtype=dtype)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    coverage = values_of(tiny_decoder("llama"), folder).held_by()
    assert coverage.held == coverage.values and not coverage.lost


@pytest.mark.parametrize("zipped", [True, False])
def test_both_formats_of_torch_save(zipped, llama, tmp_path):
    folder = llama()
    state = load_file(folder / "model.safetensors")
    torch.save(state, tmp_path / "model.bin", _use_new_zipfile_serialization=zipped)
    assert entries_in([tmp_path / "model.bin"]).keys() == state.keys()
    assert all(entry.shape == tuple(state[name].shape) for name, entry in entries_in([tmp_path / "model.bin"]).items())


def test_eager_loading(llama):
    folder = llama("score.weight")
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert load(folder, quantization_config=PT2MXConfig(_RECIPE)).lm_head.spec == pt2mx.parse("mxfp4(even,even)")
    folder = llama("vision_tower.layers.0.mlp.fc1.weight")
    with pytest.raises(MXError, match=r"vision_tower 0%; without vision_tower\.layers\.0"):
        load(folder, quantization_config=PT2MXConfig(_RECIPE))
    for allowed in ({"part": "layers"}, {"allow_partial": True}):
        loaded = load(folder, quantization_config=PT2MXConfig(_RECIPE, **allowed))
        assert loaded.lm_head.weight_packed.dtype == torch.uint8


@pytest.mark.slow_except("fp8-*down_proj-True", "fp8-*down_proj-False", "compressed-tensors-*lm_head-False")
@pytest.mark.parametrize(
    ("module", "keeps_scale"),
    [("model.layers.0.mlp.down_proj", True), ("model.layers.0.mlp.down_proj", False), ("lm_head", False)],
)
@pytest.mark.parametrize(
    ("layout", "form", "ignored", "scale"),
    [
        ("fp8", "mxfp8", "modules_to_not_convert", "weight_scale_inv"),
        ("compressed-tensors", "mxfp8(rceil)", "ignore", "weight_scale"),
    ],
)
@pytest.mark.compiled_cases("fp8-*down_proj-*")
def test_codes_in_an_unconverted_module(layout, form, ignored, scale, module, keeps_scale, tmp_path):
    """They are values only where the caller says so, with their scale or without."""
    source, out = float_checkpoint("llama", tmp_path / "float", shard="1GB"), tmp_path / "mx"
    pt2mx.convert_checkpoint(source, out, of_weights(form), layout=layout)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"][ignored] = [*config["quantization_config"].get(ignored, ()), module]
    (out / "config.json").write_text(json.dumps(config))
    state = load_file(out / "model.safetensors")
    codes, scales = state[f"{module}.weight"], state.pop(f"{module}.{scale}")
    if keeps_scale:
        state[f"{module}.{scale}"] = scales
    save_file(state, out / "model.safetensors", {"format": "pt"})
    for options in ({}, {"part": "embed_tokens"}):
        with pytest.raises(MXError, match=rf"codes or integers of {module}\.weight.* give --allow-partial"):
            pt2mx.load_checkpoint(out, **options)
    with pytest.raises(MXError, match=rf"holds {module}\.weight in torch\.float8_e4m3fn, which are codes"):
        pt2mx.convert_checkpoint(out, tmp_path / "again")
    loaded = pt2mx.load_checkpoint(out, allow_partial=True)
    values = next(tensor for name, tensor in loaded.program.state_dict.items() if name.endswith(f"{module}.weight"))
    assert torch.equal(values, codes.to(values.dtype))
    lost = codes.numel() + (scales.numel() if keeps_scale else 0)
    assert loaded.coverage.values - loaded.coverage.held == lost and "100% of" not in str(loaded.coverage)


def test_codes_in_a_float_checkpoint(llama):
    folder = llama()
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(MXError, match=r"holds codes or integers of model\.norm\.weight, which its configuration calls"):
        load(folder, quantization_config=PT2MXConfig(_RECIPE))
    load(folder, quantization_config=PT2MXConfig(_RECIPE, allow_partial=True))


@pytest.mark.compiled
def test_a_checkpoint_of_codes(llama, tmp_path):
    source, out = llama(), tmp_path / "mx"
    pt2mx.convert_checkpoint(source, out, dtype="bfloat16")
    state = load_file(out / "model.safetensors")
    state["vision_tower.layers.0.mlp.fc1.weight_packed"] = torch.ones(64, 16, dtype=torch.uint8)
    save_file(state, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(MXError, match="vision_tower 0%"):
        pt2mx.load_checkpoint(out)
    loaded = pt2mx.load_checkpoint(out, part="layers")
    total = sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
    assert loaded.coverage.held == total == loaded.coverage.values - 64 * 16
