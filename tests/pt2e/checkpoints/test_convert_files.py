import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.checkpoints import convert_files, safetensors_shards
from pt2mx.pt2e.checkpoints.convert_files import MANIFEST, convert_checkpoint
from pt2mx.pt2e.checkpoints.selection import select_weights
from tests.language_models import tiny_decoder, tokenizer_of_bytes, transformers

_SHARD = "20KB"
_WEIGHT_ONLY = "mxfp4_weight_only"


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def llama(tmp_path):
    return checkpoint("llama", tmp_path / "float")


def checkpoint(family, folder, dtype=torch.bfloat16, shard=_SHARD):
    tiny_decoder(family).to(dtype).save_pretrained(folder, max_shard_size=shard)
    tokenizer_of_bytes().save_pretrained(folder)
    return folder


def tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def of_weights(weight):
    return MXQuantizer().set_global(MXQuantizationConfig(weight=weight))


def fake_quantized(folder, recipe, but=("model.embed_tokens.weight",)):
    """The model with the values of its quantized weights and inputs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for name, specs in select_weights(model, MXQuantizer.from_recipe(recipe)).chosen.items():
        if name in but:
            continue
        parameter, layer = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
        parameter.data = pt2mx.fake_quantize_mx(parameter.data, specs.weight)
        if specs.activation:
            layer.register_forward_pre_hook(
                lambda _, args, spec=specs.activation: (pt2mx.fake_quantize_mx(args[0], spec),)
            )
    return model


@pytest.mark.parametrize(
    ("layout", "weight", "names"),
    [
        ("compressed-tensors", "mxfp4", ("weight_packed", "weight_scale")),
        ("compressed-tensors", "mxfp6_e2m3(rceil)", ("weight_packed", "weight_scale")),
        ("compressed-tensors", "mxfp8_e4m3", ("weight", "weight_scale")),
        ("quark", "mxfp6_e3m2", ("weight", "weight_scale")),
        ("fp8", "mxfp8_e4m3", ("weight", "weight_scale_inv")),
    ],
)
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_bytes_are_those_of_quantize_mx(llama, tmp_path, monkeypatch, layout, weight, names, rows):
    monkeypatch.setattr(safetensors_shards, "SLICE", rows * 128)  # rows of 64 bfloat16 values
    report = convert_checkpoint(llama, tmp_path / "out", of_weights(weight), layout=layout)
    before, after = tensors(llama), tensors(tmp_path / "out")
    assert len(report.quantized) == 15 and set(report.left) == {"model.embed_tokens.weight"}
    for name, tensor in before.items():
        if name in report.quantized:
            module = name.removesuffix("weight")
            scale, data = pt2mx.quantize_mx(tensor, weight)
            assert torch.equal(after.pop(module + names[0]).view(torch.uint8), data), name
            assert torch.equal(after.pop(module + names[1]), scale), name
        else:
            assert torch.equal(after.pop(name), tensor), name
    assert not after


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("llama", _WEIGHT_ONLY), ("qwen2", "mxfp4"), ("mixtral", _WEIGHT_ONLY)],
)
def test_transformers_loads_it_to_the_bit(tmp_path, family, recipe):
    checkpoint(family, tmp_path / "float")
    convert_checkpoint(tmp_path / "float", tmp_path / "out", recipe, jobs=2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    ids = torch.randint(256, (2, 24))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, fake_quantized(tmp_path / "float", recipe)(ids).logits)


def test_files_beside_the_weights(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "out")
    names = {path.name for path in llama.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (llama / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert {**config, "quantization_config": None} == {
        **json.loads((llama / "config.json").read_text()),
        "quantization_config": None,
    }
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = {}
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "out" / shard, "pt") as file:
            tensor = file.get_tensor(name)
            sizes[name] = tensor.nbytes
            assert file.metadata() == {"format": "pt"}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert set(index["weight_map"]) == set(tensors(tmp_path / "out"))


def test_one_file_has_no_index(tmp_path):
    checkpoint("llama", tmp_path / "float", shard="1GB")
    convert_checkpoint(tmp_path / "float", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("model*")} == {"model.safetensors"}


def test_an_interrupted_run_goes_on(llama, tmp_path):
    class Stop(Exception):
        pass

    whole, seen = [], []

    def stop(shard, shards):
        whole.append(shard)
        if len(whole) == 2:
            raise Stop

    out = tmp_path / "out"
    with pytest.raises(Stop):
        convert_checkpoint(llama, out, finished=stop)
    assert not (out / "config.json").exists() and (out / MANIFEST).exists()
    kept = {path.name for path in out.glob("model*.safetensors")}
    assert set(whole) <= kept
    partial = out / ".0123456789abcdef.safetensors"  # of a process that was killed
    partial.write_bytes(b"half")
    stamps = {name: (out / name).stat().st_mtime_ns for name in kept}
    report = convert_checkpoint(llama, out, finished=lambda shard, shards: seen.append(shard))
    assert set(report.kept) == kept and not kept & set(seen)
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == stamps
    assert not partial.exists() and not (out / MANIFEST).exists()
    convert_checkpoint(llama, tmp_path / "at_once")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "at_once").iterdir()
    }


def test_another_conversion_is_not_gone_on_with(llama, tmp_path):
    def stop(shard, shards):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(llama, tmp_path / "out", finished=stop)
    with pytest.raises(MXError, match="unfinished conversion with other settings"):
        convert_checkpoint(llama, tmp_path / "out", of_weights("mxfp8"))
    with pytest.raises(MXError, match="holds files already"):
        convert_checkpoint(llama, llama)


def test_a_shard_that_fails_stops_the_others_and_leaves_nothing(llama, tmp_path):
    shard = sorted(llama.glob("*.safetensors"))[-1]
    held = load_file(shard)
    name = next(name for name in held if name.endswith("proj.weight") or name == "lm_head.weight")
    held[name][0, 0] = torch.inf
    save_file(held, shard, {"format": "pt"})
    with pytest.raises(MXError, match="has blocks that are NaN"):
        convert_checkpoint(llama, tmp_path / "out", jobs=2)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert shard.name not in left and "config.json" not in left
    assert not [name for name in left if name.startswith(".") and name != MANIFEST]


def test_a_cast_of_what_stays(tmp_path):
    checkpoint("llama", tmp_path / "float", torch.float32)
    with pytest.raises(MXError, match=r"compute in bfloat16, and the checkpoint is in torch\.float32: give the dtype"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    convert_checkpoint(tmp_path / "float", tmp_path / "out", dtype="bfloat16")
    before, after = tensors(tmp_path / "float"), tensors(tmp_path / "out")
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"].bfloat16())
    scale, data = pt2mx.quantize_mx(
        before["lm_head.weight"], MXQuantizer.from_recipe(_WEIGHT_ONLY).to_dict()[""]["weight"]
    )
    assert torch.equal(after["lm_head.weight_packed"], data)
    assert torch.equal(after["lm_head.weight_scale"], scale)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded(torch.arange(40)[None]).logits.dtype == torch.bfloat16


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
    """A checkpoint of GPT-2's age: without the prefix of its base model, and with columns as outputs."""
    checkpoint("gptj", tmp_path / "float")
    folder = tmp_path / "float"
    for path in folder.glob("*.safetensors"):
        held = load_file(path)
        save_file({name.removeprefix("transformer."): value for name, value in held.items()}, path, {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name.removeprefix("transformer."): shard for name, shard in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    report = convert_checkpoint(folder, tmp_path / "out")
    assert "h.0.mlp.fc_in.weight" in report.quantized
    with pytest.raises(MXError, match=r"no tensor of the checkpoint would be quantized.*keep layers of type Conv1D"):
        convert_checkpoint(checkpoint("gpt2", tmp_path / "gpt2"), tmp_path / "gpt2_out")


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
    checkpoint("gpt_oss", tmp_path / "float")
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


def test_experts_that_readers_take_for_quantized(tmp_path):
    checkpoint("mixtral", tmp_path / "float")
    quantizer = MXQuantizer.from_recipe(_WEIGHT_ONLY).set_module_name("model.layers.1.mlp.experts", None)
    with pytest.raises(MXError, match=r"reads all experts in one format"):
        convert_checkpoint(tmp_path / "float", tmp_path / "out", quantizer)


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("mxint8", {}, "compressed-tensors cannot hold .*_proj.weight in int8"),
        ("mxfp8", {}, "cannot say that inputs of .* are mxfp8_e4m3"),
        (of_weights("mxfp4{16}"), {}, r"cannot hold .* in mxfp4_e2m1\{16\}: its blocks have 32 values"),
        ("mxfp4_decoder", {}, "which is not applied to weights"),
        ("no_such_recipe", {}, "no recipe 'no_such_recipe'"),
        (_WEIGHT_ONLY, {"layout": "gguf"}, "unknown layout 'gguf'"),
        (_WEIGHT_ONLY, {"layout": "mxfp4"}, "no tensor of the checkpoint would be quantized .*mxfp4 has experts alone"),
        (_WEIGHT_ONLY, {"dtype": "int8"}, "dtype='int8' must be"),
        (_WEIGHT_ONLY, {"dtype": "no_dtype"}, "dtype='no_dtype' must be"),
        (_WEIGHT_ONLY, {"jobs": 0}, "jobs=0 must be"),
        (MXQuantizer().set_global(MXQuantizationConfig(weight="mxfp4", output="mxfp8")), {}, "a bias or an output"),
    ],
)
def test_settings_that_no_checkpoint_holds(llama, tmp_path, recipe, options, message):
    with pytest.raises(MXError, match=message):
        convert_checkpoint(llama, tmp_path / "out", recipe, **options)
    assert not (tmp_path / "out").exists()


def write(text):
    return lambda folder: (folder / "config.json").write_text(text)


def cut(size):
    return lambda folder: os.truncate(sorted(folder.glob("*.safetensors"))[1], size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (write("{"), "cannot read"),
        (write("[]"), "holds no JSON object"),
        (write('{"architectures": ["Net"]}'), "the architecture 'Net', which transformers has not"),
        (write('{"quantization_config": {"quant_method": "fp8"}}'), "is quantized already"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "holds neither model.safetensors nor"),
        (lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), "which is not there: fetch"),
        (cut(5000), "no whole file of safetensors"),
        (cut(4), "no whole file of safetensors"),
    ],
)
def test_bad_checkpoints(llama, tmp_path, damage, message):
    damage(llama)
    with pytest.raises(MXError, match=message):
        convert_checkpoint(llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_not_there(tmp_path):
    folder = checkpoint("llama", tmp_path / "float", shard="1GB")
    held = load_file(folder / "model.safetensors")
    del held["lm_head.weight"]  # transformers draws it
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    report = convert_checkpoint(folder, tmp_path / "out")
    assert report.left["lm_head.weight"] == "the checkpoint does not hold it"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]


def test_paths_that_are_no_folders(llama, tmp_path):
    with pytest.raises(MXError, match="is no folder"):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(MXError, match="must be the path of a folder"):
        convert_checkpoint(llama, None)
    (tmp_path / "file").touch()
    with pytest.raises(MXError, match=r"cannot write to .*/file': File exists"):
        convert_checkpoint(llama, tmp_path / "file")


def test_folders_inside_are_copied(llama, tmp_path):
    for name in ("1_Pooling/config.json", "original/consolidated.pth", ".cache/lock", "pytorch_model.bin"):
        (llama / name).parent.mkdir(exist_ok=True)
        (llama / name).write_text(name)
    out = llama / "quantized"
    convert_checkpoint(llama, out)
    assert (out / "1_Pooling" / "config.json").read_text() == "1_Pooling/config.json"
    assert not {"original", ".cache", "quantized", "pytorch_model.bin"} & {path.name for path in out.iterdir()}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensor(tmp_path, run_python):
    """An embedding and a head of 100 MB: what is held at a time is some slices."""
    config = transformers.LlamaConfig(
        vocab_size=50_000, hidden_size=1024, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=8
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "float")
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in transformers.LlamaForCausalLM(config).state_dict().items()}
    ones = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(ones, tmp_path / "float" / "model.safetensors")
    code = """
import resource, sys
from pathlib import Path
from pt2mx import MXQuantizer
from pt2mx.pt2e.checkpoints.conversion_plan import plan_conversion
from pt2mx.pt2e.checkpoints.convert_files import convert_checkpoint
from pt2mx.pt2e.checkpoints.layouts import LAYOUTS
quantizer = MXQuantizer.from_recipe("mxfp4_weight_only")
plan_conversion(Path(sys.argv[1]), quantizer, LAYOUTS["compressed-tensors"], None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_checkpoint(sys.argv[1], sys.argv[2], quantizer)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    grown = int(run_python(code, [str(tmp_path / "float"), str(tmp_path / "out")]))
    assert grown < 90  # MiB


def test_the_manifest_is_of_this_version(llama, tmp_path):
    seen = {}

    def look(shard, shards):
        seen.update(json.loads((tmp_path / "out" / MANIFEST).read_text()))

    convert_checkpoint(llama, tmp_path / "out", finished=look)
    assert seen["pt2mx"] == convert_files.__version__ and len(seen["formats"]) == 15
