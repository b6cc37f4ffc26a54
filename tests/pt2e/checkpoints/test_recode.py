import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import pt2mx
from pt2mx import MXError
from pt2mx.pt2e.checkpoints.convert_files import MANIFEST, convert_checkpoint
from pt2mx.pt2e.checkpoints.recode import alike_form, recode
from pt2mx.pt2e.cli.command import main
from pt2mx.pt2e.models.weight_formats import NVFP4, NVFP4_DIVISOR, PackedTensors, spec_of
from tests.float_checkpoints import of_weights, tensors

Q = "model.layers.0.self_attn.q_proj.weight"


def packed_as(form, x):
    spec = spec_of(form)
    tensor_scale = pt2mx.tensor_scale_mx(x, spec) if spec.scale_format.tensor else None
    scale, data = pt2mx.quantize_mx(x, spec, tensor_scale=tensor_scale)
    return PackedTensors(data, scale, spec, tensor_scale)


def values(packed, dtype=torch.float32):
    return pt2mx.dequantize_mx(*packed[:3], target_dtype=dtype, tensor_scale=packed.tensor_scale)


@pytest.mark.parametrize(
    ("form", "new", "dtype"),
    [
        ("fp4_e2m1", NVFP4, torch.float32),
        ("fp4_e2m1", NVFP4_DIVISOR, torch.float32),
        ("fp8_e4m3{128x128}", "fp8_e4m3", torch.float32),
        (NVFP4, NVFP4_DIVISOR, torch.bfloat16),
        (NVFP4_DIVISOR, NVFP4, torch.bfloat16),
    ],
)
def test_the_values_stay_equal(form, new, dtype):
    packed = packed_as(form, torch.randn(160, 256))
    recoded = recode("w", packed, new, dtype)
    assert recoded.spec == spec_of(new) and torch.equal(recoded.data, packed.data)
    assert torch.equal(values(recoded, dtype), values(packed, dtype))


def test_on_the_device_of_the_weight():
    """As on a GPU: what is made on the default device, here another one, cannot be combined with the weight."""
    packed = packed_as(NVFP4, torch.randn(4, 64))
    expected = recode("w", packed, NVFP4_DIVISOR, torch.bfloat16)
    with torch.device("meta"):
        recoded = recode("w", packed, NVFP4_DIVISOR, torch.bfloat16)
    assert torch.equal(recoded.tensor_scale, expected.tensor_scale)


@pytest.mark.parametrize("form", [NVFP4, NVFP4_DIVISOR])
def test_mxfp4_and_back(form):
    packed = packed_as("fp4_e2m1", torch.randn(4, 64))
    assert torch.equal(
        recode("w", recode("w", packed, form, torch.float32), "fp4_e2m1", torch.float32).scale, packed.scale
    )


def test_what_has_no_equal():
    packed = packed_as(NVFP4, torch.tensor([0.7, 2.3, 0.3, 5.1, 0.11]).repeat_interleave(16)[None])
    with pytest.raises(MXError, match="w cannot be converted to fp4_e2m1: no exact conversion: block"):
        recode("w", packed, "fp4_e2m1", torch.bfloat16)
    with pytest.raises(MXError, match=r"no reciprocal of its tensor scale 0.0018.* in torch.float32"):
        recode("w", packed, NVFP4_DIVISOR, torch.float32)
    wide = packed_as("fp4_e2m1", torch.tensor([1.0, 2.0**-30]).repeat_interleave(32)[None])
    with pytest.raises(MXError, match="w cannot be converted to nvfp4: no exact conversion: block"):
        recode("w", wide, NVFP4, torch.bfloat16)
    assert alike_form("fp8_e4m3{128x128}(f32)", ("fp8_e4m3",)) is None


def test_from_file_to_file_through_all_layouts_of_fp4(llama, tmp_path):
    """MXFP4 of compressed-tensors -> ModelOpt -> NVFP4 of compressed-tensors -> MXFP4 of Quark: the same bytes."""
    convert_checkpoint(llama, tmp_path / "mx", of_weights("mxfp4{32}(even,even)"))
    for source, output, layout, algorithm in (
        ("mx", "modelopt", "modelopt", "W4A16_NVFP4"),
        ("modelopt", "nv", "compressed-tensors", None),
        ("nv", "quark", "quark", None),
    ):
        report = convert_checkpoint(tmp_path / source, tmp_path / output, layout=layout)
        assert set(report.quantized.values()) == {
            "modelopt": {"nvfp4_e2m1{16}"}, "nv": {str(spec_of(NVFP4_DIVISOR))}, "quark": {str(spec_of("fp4_e2m1"))}
        }[output]  # fmt: skip
        config = json.loads((tmp_path / output / "config.json").read_text())["quantization_config"]
        assert config.get("quant_algo") == algorithm
    first, last = tensors(tmp_path / "mx"), tensors(tmp_path / "quark")
    assert torch.equal(last[Q], first[f"{Q}_packed"]) and torch.equal(last[f"{Q}_scale"], first[f"{Q}_scale"])
    floats = first.keys() & last.keys() - {name for name in last if name.endswith("_scale")}
    assert floats and all(torch.equal(first[name], last[name]) for name in floats)
    modelopt, nv = tensors(tmp_path / "modelopt"), tensors(tmp_path / "nv")
    assert modelopt[f"{Q}_scale_2"].shape == () and nv[f"{Q}_global_scale"].shape == (1,)
    assert modelopt[f"{Q}_scale"].dtype == nv[f"{Q}_scale"].dtype == torch.float8_e4m3fn
    assert (tmp_path / "modelopt" / "hf_quant_config.json").exists()
    index = json.loads((tmp_path / "nv" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(nv)


def test_an_interrupted_conversion_goes_on(llama, tmp_path):
    class Stop(Exception):
        pass

    def stop(shard, shards):
        raise Stop

    convert_checkpoint(llama, tmp_path / "mx", of_weights("mxfp4"))
    with pytest.raises(Stop):
        convert_checkpoint(tmp_path / "mx", tmp_path / "out", layout="modelopt", finished=stop)
    assert (tmp_path / "out" / MANIFEST).exists() and not (tmp_path / "out" / "config.json").exists()
    report = convert_checkpoint(tmp_path / "mx", tmp_path / "out", layout="modelopt")
    assert report.kept and not (tmp_path / "out" / MANIFEST).exists()


def _zero_scales(checkpoint):
    checkpoint[f"{Q}_scale"] = torch.zeros_like(checkpoint[f"{Q}_scale"].float()).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_zero_scales, f"{Q}_scale holds a scale of 0 for codes that are not 0"),
        (lambda checkpoint: checkpoint[f"{Q}_scale_2"].fill_(float("nan")), f"{Q}_scale_2 is nan"),
        (lambda checkpoint: checkpoint.pop(f"{Q}_scale_2"), f"holds no {Q}_scale_2, which"),
        (
            lambda checkpoint: checkpoint.update({f"{Q[:-7]}.pre_quant_scale": torch.ones(64)}),
            "pre_quant_scale multiplies",
        ),
        (lambda checkpoint: checkpoint.pop("model.norm.weight"), "lacks model.norm.weight"),
    ],
)
def test_bad_checkpoints_leave_nothing(llama, tmp_path, change, text):
    convert_checkpoint(llama, tmp_path / "mx", of_weights("mxfp4"))
    convert_checkpoint(tmp_path / "mx", tmp_path / "source", layout="modelopt")
    files = {path: load_file(path) for path in (tmp_path / "source").glob("*.safetensors")}
    merged = {name: tensor for held in files.values() for name, tensor in held.items()}
    change(merged)
    shutil.rmtree(tmp_path / "mx")
    for path in [*files, tmp_path / "source" / "model.safetensors.index.json"]:
        path.unlink()
    save_file(merged, tmp_path / "source" / "model.safetensors")
    with pytest.raises(MXError, match=text):
        convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists() and not list(tmp_path.glob("out/*.safetensors"))


def test_layouts_without_such_a_format(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "mx", of_weights("mxfp4"))
    with pytest.raises(MXError, match=r"is quantized already .* no recipe"):
        convert_checkpoint(tmp_path / "mx", tmp_path / "out", "mxfp4_weight_only")
    with pytest.raises(MXError, match="mxfp4 holds experts alone"):
        convert_checkpoint(tmp_path / "mx", tmp_path / "out", layout="mxfp4")
    convert_checkpoint(llama, tmp_path / "six", of_weights("mxfp6_e3m2"), layout="quark")
    with pytest.raises(MXError, match=r"modelopt cannot hold .* in fp6_e3m2"):
        convert_checkpoint(tmp_path / "six", tmp_path / "out", layout="modelopt")
    assert not (tmp_path / "out").exists()


def test_the_command(llama, tmp_path, capsys):
    """It keeps the codes of a quantized checkpoint; bad input is one line, exit status 2, and no configuration."""
    mx, out = str(tmp_path / "mx"), str(tmp_path / "out")
    assert main(["convert-checkpoint", str(llama), mx]) == 0
    assert main(["convert-checkpoint", mx, out, "--recipe", "mxfp4_weight_only"]) == 2
    assert main(["convert-checkpoint", mx, out, "--layout", "modelopt"]) == 0
    assert "nvfp4_e2m1{16}: 15 tensors" in capsys.readouterr().out
    path = next(path for path in (tmp_path / "out").glob("*.safetensors") if f"{Q}_scale_2" in load_file(path))
    save_file(load_file(path) | {f"{Q}_scale_2": torch.tensor(float("nan"))}, path, {"format": "pt"})
    assert main(["convert-checkpoint", out, str(tmp_path / "again"), "--layout", "quark"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pt2mx: error: ")]
    assert errors[-1:] == [f"pt2mx: error: {Q}_scale_2 is nan: a tensor scale is a positive number"]
    assert main(["quantize", "--model", f"hf:{out}", "--output", str(tmp_path / "program")]) == 2
    assert not (tmp_path / "again" / "config.json").exists() and not (tmp_path / "program").exists()
    config = json.loads((tmp_path / "mx" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"
    (tmp_path / "mx" / "config.json").write_text(json.dumps(config))
    for command in (["quantize", "--model", f"hf:{mx}", "--output"], ["convert-checkpoint", mx]):
        assert main([*command, str(tmp_path / "last")]) == 2 and not (tmp_path / "last").exists()
        assert "pt2mx: error: quant_method 'gptq' of the checkpoint is none of" in capsys.readouterr().err
