import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import pt2mx
from pt2mx import MXError, MXQuantizationConfig, MXQuantizer
from pt2mx.pt2e.checkpoints.convert_files import MANIFEST, convert_checkpoint
from pt2mx.pt2e.checkpoints.convert_shards import cast
from pt2mx.pt2e.checkpoints.select_weights import select_weights
from pt2mx.pt2e.models import safetensors_shards
from tests.float_checkpoints import float_checkpoint, load_packed_model, of_weights, tensors
from tests.language_models import transformers

_WEIGHT_ONLY = "mxfp4_weight_only"


def fake_quantized(folder, recipe, but=("model.embed_tokens.weight",)):
    """Return the float model with the values of quantized weights and inputs."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    quantizer = recipe if isinstance(recipe, MXQuantizer) else MXQuantizer.from_recipe(recipe)
    for name, specs in select_weights(model, quantizer).chosen.items():
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
    ("layout", "weight", "names", "rows"),
    [
        ("compressed-tensors", "mxfp4", ("weight_packed", "weight_scale"), 1),
        ("compressed-tensors", "mxfp4", ("weight_packed", "weight_scale"), 1000),
        ("compressed-tensors", "mxfp6_e2m3(rceil)", ("weight_packed", "weight_scale"), 5),
        ("compressed-tensors", "mxfp8_e4m3", ("weight", "weight_scale"), 7),
        ("quark", "mxfp6_e3m2", ("weight", "weight_scale"), 5),
        ("fp8", "mxfp8_e4m3", ("weight", "weight_scale_inv"), 5),
    ],
)
def test_bytes_are_those_of_quantize_mx(llama, tmp_path, monkeypatch, layout, weight, names, rows):
    monkeypatch.setattr(safetensors_shards, "SLICE", rows * 128)  # rows of 64 bfloat16 values
    report = convert_checkpoint(llama, tmp_path / "out", of_weights(weight), layout=layout, quantized_head=True)
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
    float_checkpoint(family, tmp_path / "float")
    convert_checkpoint(tmp_path / "float", tmp_path / "out", recipe, jobs=2)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    ids = torch.randint(256, (2, 24))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, fake_quantized(tmp_path / "float", recipe)(ids).logits)


def test_modelopt(llama, tmp_path):
    """The checkpoint has the bytes of `quantize_mx`, both configuration files, and the stated format of inputs."""
    specs = MXQuantizationConfig(weight="mxfp8(rceil)", activation="mxfp8(rceil)")
    quantizer = MXQuantizer().set_global(specs).set_module_name("lm_head", None)
    report = convert_checkpoint(llama, tmp_path / "out", quantizer, layout="modelopt")
    before, after = tensors(llama), tensors(tmp_path / "out")
    assert len(report.quantized) == 14
    for name in report.quantized:
        scale, data = pt2mx.quantize_mx(before.pop(name), "mxfp8(rceil)")
        codes = after.pop(name)
        assert codes.dtype == torch.float8_e4m3fn and torch.equal(codes.view(torch.uint8), data)
        assert torch.equal(after.pop(f"{name}_scale"), scale)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in after)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "modelopt" and written["ignore"] == ["lm_head"]
    own = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert own["quantization"] == {
        "quant_algo": "MXFP8",
        "kv_cache_quant_algo": None,
        "group_size": 32,
        "exclude_modules": ["lm_head"],
    }
    ids = torch.randint(256, (2, 24))
    expected = fake_quantized(llama, quantizer)(ids).logits
    assert torch.equal(load_packed_model(tmp_path / "out")(ids).logits, expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]  # ModelOpt's file has it, too
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert torch.equal(load_packed_model(tmp_path / "out")(ids).logits, expected)


def test_a_cast_of_what_stays(tmp_path):
    float_checkpoint("llama", tmp_path / "float", torch.float32)
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


@pytest.mark.parametrize(("value", "fits"), [(65504.0, True), (65519.0, True), (65520.0, False), (1e38, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_cast_makes_no_inf_of_a_finite_value(value, fits, sign):
    values = torch.tensor([0.0, sign * value, torch.inf])
    if fits:
        assert cast("norm.weight", values, torch.float16).tolist() == [0.0, sign * 65504.0, torch.inf]
    else:
        with pytest.raises(MXError, match=r"norm\.weight holds .*, which is Inf in torch\.float16: give dtype"):
            cast("norm.weight", values, torch.float16)
    assert cast("norm.weight", values, torch.bfloat16).isinf().tolist() == [False, False, True]
    largest = torch.tensor([torch.finfo(torch.float32).max])
    with pytest.raises(MXError, match=r"holds 3\.40282e\+38, which is Inf in torch\.bfloat16: leave dtype .* out"):
        cast("norm.weight", largest, torch.bfloat16)


def test_a_checkpoint_beyond_the_range_of_float16(tmp_path):
    folder = float_checkpoint("llama", tmp_path / "float", shard="1GB")
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][3] = 70000.0
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MXError, match=r"model\.norm\.weight holds 70144, which is Inf in torch\.float16"):
        convert_checkpoint(folder, tmp_path / "out", of_weights("mxfp4"), layout="quark", dtype="float16")
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_shard_that_fails_stops_the_others_and_leaves_nothing(llama, tmp_path):
    shard = sorted(llama.glob("*.safetensors"))[-1]
    state = load_file(shard)
    name = next(name for name in state if name.endswith("proj.weight") or name == "lm_head.weight")
    state[name][0, 0] = torch.inf
    save_file(state, shard, {"format": "pt"})
    with pytest.raises(MXError, match="has blocks that are NaN"):
        convert_checkpoint(llama, tmp_path / "out", jobs=2)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert shard.name not in left and "config.json" not in left
    assert not [name for name in left if name.startswith(".") and name != MANIFEST]


FULL_DISK = """
import resource, sys
from pt2mx import MXError
from pt2mx.pt2e.checkpoints.convert_files import convert_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
try:
    convert_checkpoint(sys.argv[1], sys.argv[2])
except MXError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX alone has the limits")
def test_a_full_disk(llama, tmp_path, run_python):
    printed = run_python(FULL_DISK, [str(llama), str(tmp_path / "out")])
    assert re.fullmatch(r"cannot write '.*\.safetensors': File too large\n", printed)
    assert not list((tmp_path / "out").glob(".*.safetensors"))
    report = convert_checkpoint(llama, tmp_path / "out")
    assert len(report.quantized) == 15


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensor(tmp_path, run_python):
    """An embedding and a head of 100 MB need memory only for some slices."""
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
from pt2mx.pt2e.checkpoints.sources import read_source
from pt2mx.pt2e.models.layouts import LAYOUTS
quantizer = MXQuantizer.from_recipe("mxfp4_weight_only")
layout = LAYOUTS["compressed-tensors"]
plan_conversion(read_source(Path(sys.argv[1]), layout, False), quantizer, layout, None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert_checkpoint(sys.argv[1], sys.argv[2], quantizer)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    grown = int(run_python(code, [str(tmp_path / "float"), str(tmp_path / "out")], fresh=True))
    assert grown < 90  # MiB
