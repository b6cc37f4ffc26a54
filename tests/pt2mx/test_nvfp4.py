"""NVFP4 by the presets of three libraries, compared with what they gave for the same inputs (`nvfp4.npz`): E2M1 in
blocks of 16, E4M3 scales, and a float32 scale a tensor or none."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pt2mx import MXError, dequantize_mx, fake_quantize_mx, parse, quantize_mx, tensor_scale_mx
from pt2mx.compat import PRESETS

GOLDEN = np.load(Path(__file__).with_name("nvfp4.npz"))
INPUTS = sorted({name.partition("/")[0] for name in GOLDEN.files})
#: library -> its results, and the scale format
TWO_LEVELS = {
    "torchao": ("torchao/two_level", "tensor_scale"),
    "modelopt": ("modelopt", "scale_2"),
    "compressed_tensors": ("compressed_tensors", "global_scale"),
}


def recorded(name: str, dtype: str, what: str) -> torch.Tensor | None:
    key = f"{name}/{dtype}/{what}"
    return torch.from_numpy(GOLDEN[key]) if key in GOLDEN.files else None


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("library", TWO_LEVELS)
def test_two_levels_equal_the_library(library, name, dtype):
    preset, (folder, tensor) = PRESETS[library], TWO_LEVELS[library]
    x = recorded(name, dtype, "x").to(getattr(torch, dtype))
    tensor_scale = preset.tensor_scale(x, "nvfp4")
    assert bits(tensor_scale) == bits(recorded(name, dtype, f"{folder}/{tensor}"))
    scale, codes = preset.quantize(x, "nvfp4", tensor_scale)
    assert bits(scale) == bits(recorded(name, dtype, f"{folder}/scale"))
    if (want := recorded(name, dtype, f"{folder}/codes")) is not None:
        assert torch.equal(codes, want)
    if (want := recorded(name, dtype, f"{folder}/dequantized")) is not None:
        got = preset.dequantize(codes, scale, "nvfp4", tensor_scale=tensor_scale)
        # compressed-tensors rounds its result to the dtype of the input, ModelOpt's is float32
        got = got.to(x.dtype).float() if library == "compressed_tensors" else got
        assert torch.equal(got, want)
        assert torch.equal(preset.fake_quantize(x, "nvfp4").float(), want.to(x.dtype).float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", INPUTS)
def test_one_level_equals_torchao(name, dtype):
    x = recorded(name, dtype, "x").to(getattr(torch, dtype))
    scale, codes = PRESETS["torchao"].quantize(x, "fp4{16}(e4m3)")
    assert bits(scale) == bits(recorded(name, dtype, "torchao/one_level/scale"))
    assert torch.equal(codes, recorded(name, dtype, "torchao/one_level/codes"))


def test_all_of_the_record_is_checked():
    assert len(INPUTS) == 7 and len(GOLDEN.files) == 182


def test_presets_differ_by_their_scale_modes():
    specs = {name: str(PRESETS[name].spec("nvfp4")) for name in TWO_LEVELS}
    assert specs == {
        "torchao": "nvfp4_e2m1{16}(nearest_reciprocal)",
        "modelopt": "nvfp4_e2m1{16}",
        "compressed_tensors": "fp4_e2m1{16}(nearest_flush,e4m3_f32_divisor)",
    }


def test_a_tensor_scale_belongs_to_its_formats():
    x, one = torch.randn(2, 32), torch.ones(())
    assert torch.equal(
        fake_quantize_mx(x, "nvfp4"), fake_quantize_mx(x, "nvfp4", tensor_scale=tensor_scale_mx(x, "nvfp4"))
    )
    with pytest.raises(MXError, match=r"nvfp4_e2m1\{16\} has a tensor scale: pass tensor_scale"):
        quantize_mx(x, "nvfp4")
    with pytest.raises(MXError, match=r"mxfp4_e2m1\{32\} has no tensor scale, but tensor_scale was passed"):
        fake_quantize_mx(x, "mxfp4", tensor_scale=one)
    with pytest.raises(MXError, match="has no tensor scale: e4m3 scales are all"):
        tensor_scale_mx(x, "fp4{16}(e4m3)")
    with pytest.raises(MXError, match=r"tensor_scale must be one float32 number, not of shape \(2,\)"):
        quantize_mx(x, "nvfp4", tensor_scale=torch.ones(2))
    with pytest.raises(MXError, match="takes E8M0 scales"):
        parse("nvfp4").check_plain_scale()
    scale, data = quantize_mx(x, "nvfp4", tensor_scale=one)
    with pytest.raises(
        MXError, match=r"scale of shape \(1, 2\) does not fit data of shape \(2, 16\): 32 values of fp4_e2m1"
    ):
        dequantize_mx(data, scale[:1], "nvfp4", tensor_scale=one)
    with pytest.raises(MXError, match=r"are torch\.uint8 and scales torch\.uint8, not torch\.uint8 and torch.float32"):
        dequantize_mx(data, scale.float(), "nvfp4", tensor_scale=one)
