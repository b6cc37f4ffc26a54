from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam

import pt2mx
from pt2mx import ELEMENTS, MXError, MXSpec
from pt2mx.pt2e.checkpoints.configs import write_config
from pt2mx.pt2e.checkpoints.merge_parts import rows_of_scales
from pt2mx.pt2e.models.layouts import LAYOUTS
from pt2mx.pt2e.models.module_schemes import Module, Scheme
from pt2mx.pt2e.models.weight_formats import NVFP4, NVFP4_DIVISOR, format_of, spec_of

NVFP4_RECORDED = np.load(Path(__file__).parents[2] / "pt2mx" / "nvfp4.npz")
COMPRESSED, E4M3 = LAYOUTS["compressed-tensors"], torch.float8_e4m3fn


def group_of(element, inputs=None):
    """Return the group of compressed-tensors that our configuration means for a layer."""
    config = write_config(COMPRESSED, {"fc": Module("Linear", Scheme(element, inputs))})
    return QuantizationScheme.model_validate(config["config_groups"]["group_0"])


MX = [form for form in COMPRESSED.stored if form in ELEMENTS]


@pytest.mark.parametrize("element", MX)
def test_bytes_are_those_of_compressed_tensors_own_compressor(element):
    weight = torch.randn(48, 96, dtype=torch.bfloat16) * torch.randn(48, 1).exp2().bfloat16()
    scale, data = pt2mx.quantize_mx(weight, element, scale_mode="even")
    if element == "fp4_e2m1":  # compressed-tensors' compressor loses the sign of zero in FP4
        low, high = (code.where(code != 8, 0) for code in (data & 15, data >> 4))
        data = low | high << 4
    values = pt2mx.dequantize_mx(data, scale, element, target_dtype=torch.bfloat16)
    group = group_of(element)
    state = {"weight": values, "weight_scale": (scale.float() - 127).exp2().bfloat16()}
    expected = BaseCompressor.get_value_from_registry(group.format).compress(state, group)
    result = COMPRESSED.to_tensors("weight", element, data, scale)
    assert result.keys() == expected.keys()
    for name, tensor in result.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))
    back = COMPRESSED.from_tensors("weight", element, expected)
    assert torch.equal(back.data, data) and torch.equal(back.scale, scale)


def test_nvfp4_bytes_are_those_of_compressed_tensors_own_compressor():
    """From the same float32 weight, with the preset."""
    weight = torch.randn(48, 96) * torch.randn(48, 1).exp2()
    spec = spec_of(NVFP4_DIVISOR).replace(scale_mode="nearest_flush")
    tensor_scale = pt2mx.tensor_scale_mx(weight, spec)
    scale, data = pt2mx.quantize_mx(weight, spec, tensor_scale=tensor_scale)
    group = group_of(NVFP4_DIVISOR)
    global_scale = generate_gparam(weight.amin(), weight.amax())
    blocks = weight.unflatten(-1, (-1, 16))
    peer_scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), group.weights, global_scale=global_scale)
    state = {"weight": weight, "weight_scale": peer_scale, "weight_global_scale": global_scale}
    expected = BaseCompressor.get_value_from_registry(group.format).compress(state, group)
    result = COMPRESSED.to_tensors("weight", NVFP4_DIVISOR, data, scale, tensor_scale)
    assert result.keys() == expected.keys() == {"weight_packed", "weight_scale", "weight_global_scale"}
    for name, tensor in result.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8))
    decompressed = BaseCompressor.get_value_from_registry(group.format).decompress(expected, group)["weight"]
    back = COMPRESSED.from_tensors("weight", NVFP4_DIVISOR, expected)
    values = pt2mx.dequantize_mx(*back[:3], target_dtype=torch.bfloat16, tensor_scale=back.tensor_scale)
    assert torch.equal(values, decompressed)


@pytest.mark.parametrize("element", MX)
def test_inputs_are_quantized_as_compressed_tensors_does(element):
    """All bits are equal except in FP8 blocks with largest value 1.75 * 2**e, whose scale is twice ours."""
    (mode,) = COMPRESSED.inputs[element]
    x = torch.randn(2000, 64, dtype=torch.bfloat16) * torch.randint(-20, 20, (2000, 1)).float().exp2().bfloat16()
    x[0] = 0
    arguments = group_of("fp4_e2m1", MXSpec(element, scale_mode=mode)).input_activations
    scale, zero = compute_dynamic_scales_and_zp(x, arguments, torch.nn.Identity())
    expected = fake_quantize(x, scale, zero, arguments).unflatten(-1, (-1, 32))
    result = pt2mx.fake_quantize_mx(x, element, scale_mode=mode).unflatten(-1, (-1, 32))
    other = (result != expected).any(-1)
    amax = x.unflatten(-1, (-1, 32)).abs().amax(-1)
    odd = (amax.float().frexp().mantissa == 0.875) & torch.tensor(element == "fp8_e4m3")
    assert not (other & ~odd).any() and bool(odd.any()) == (element == "fp8_e4m3")


@pytest.mark.parametrize(
    ("layout", "element"), [(name, element) for name in LAYOUTS for element in LAYOUTS[name].stored]
)
def test_to_tensors_and_back(layout, element):
    spec, x = spec_of(element), torch.randn(3, 128, 256)
    tensor_scale = pt2mx.tensor_scale_mx(x, spec) if spec.scale_format.tensor else None
    scale, data = pt2mx.quantize_mx(x, spec, tensor_scale=tensor_scale)
    tensors = LAYOUTS[layout].to_tensors("experts.down_proj", element, data, scale, tensor_scale)
    memory = {tensor.data_ptr() for tensor in (data, scale, tensor_scale) if tensor is not None}
    assert {tensor.data_ptr() for tensor in tensors.values()} == memory
    back = LAYOUTS[layout].from_tensors("experts.down_proj", element, tensors, (spec.block_rows, spec.block_size))
    assert format_of(back.spec) == element
    assert torch.equal(back.data, data) and torch.equal(back.scale, scale) and back.tensor_scale == tensor_scale


def test_what_cannot_be_held():
    scale, data = pt2mx.quantize_mx(torch.randn(4, 40), "fp4_e2m1")
    with pytest.raises(MXError, match=r"w has codes of shape \(4, 20\) and scales of shape \(4, 2\)"):
        COMPRESSED.to_tensors("w", "fp4_e2m1", data, scale)
    with pytest.raises(MXError, match=r"cannot hold w in fp6_e3m2: it has .*; quark can"):
        COMPRESSED.to_tensors("w", "fp6_e3m2", data, scale)
    scale, data = pt2mx.quantize_mx(torch.full((4, 32), float("nan")), "fp4_e2m1")
    with pytest.raises(MXError, match="w has blocks that are NaN"):
        COMPRESSED.to_tensors("w", "fp4_e2m1", data, scale)


def _nvfp4():
    weight = torch.randn(4, 32)
    tensor_scale = pt2mx.tensor_scale_mx(weight, NVFP4)
    scale, data = pt2mx.quantize_mx(weight, NVFP4, tensor_scale=tensor_scale)
    return LAYOUTS["modelopt"].to_tensors("fc.weight", NVFP4, data, scale, tensor_scale)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fc.weight_scale_2": torch.tensor(float("nan"))}, "fc.weight_scale_2 is nan: a tensor scale is a positive"),
        ({"fc.weight_scale_2": torch.tensor(0.0)}, "fc.weight_scale_2 is 0: a tensor scale is a positive"),
        ({"fc.weight_scale_2": torch.ones(2)}, r"fc.weight_scale_2 is torch.float32 of shape \(2,\)"),
        ({"fc.weight_scale_2": torch.ones(()).half()}, "fc.weight_scale_2 is torch.float16 of shape"),
        ({"fc.weight_scale_2": None}, "the checkpoint holds no fc.weight_scale_2"),
        (
            {"fc.weight_scale": torch.zeros(4, 2).to(torch.float8_e4m3fn)},
            "fc.weight_scale holds a scale of 0 for codes",
        ),
        ({"fc.weight_scale": torch.full((4, 2), -1.0).to(E4M3)}, "fc.weight_scale holds negative scales"),
        ({"fc.weight_scale": torch.full((4, 2), float("nan")).to(E4M3)}, "fc.weight_scale holds NaN scales"),
        ({"fc.weight_scale": torch.ones(4, 2)}, "fc.weight_scale is torch.float32"),
        ({"fc.weight_scale": torch.ones(4, 1).to(E4M3)}, "fc.weight has codes of shape"),
    ],
)
def test_scales_that_are_impossible(change, text):
    tensors = {name: tensor for name, tensor in (_nvfp4() | change).items() if tensor is not None}
    with pytest.raises(MXError, match=text):
        LAYOUTS["modelopt"].from_tensors("fc.weight", NVFP4, tensors)


@pytest.mark.parametrize(
    ("codes", "grid", "block", "expected"),
    [
        ((64, 64), (64, 2), (128, 128), "fp8_e4m3"),
        ((576, 512), (5, 4), (128, 128), "fp8_e4m3{128x128}"),  # the last block has 64 rows
        ((64, 64), (1, 1), (1, 32), "fp8_e4m3{64x64}"),
        ((64, 64), (1, 1), (128, 128), "fp8_e4m3{128x128}"),
        ((96, 64), (3, 1), (128, 128), "fp8_e4m3{32x64}"),
        ((64, 64), (3, 1), (128, 128), None),
        ((64, 64), (0, 1), (128, 128), None),
        ((64, 64), (64,), (128, 128), None),
    ],
)
def test_the_grid_of_scales_decides_the_block(codes, grid, block, expected):
    tensors = {
        "w": torch.zeros(codes).to(torch.float8_e4m3fn),
        "w_scale_inv": torch.ones(grid).to(torch.float8_e8m0fnu),
    }
    if expected is None:
        with pytest.raises(MXError, match=r"w has codes of shape .*: no block of fp8_e4m3 gives such a grid"):
            LAYOUTS["fp8"].from_tensors("w", "fp8_e4m3", tensors, block)
        return
    assert format_of(LAYOUTS["fp8"].from_tensors("w", "fp8_e4m3", tensors, block).spec) == expected
    floats = {**tensors, "w_scale_inv": torch.ones(grid)}
    assert LAYOUTS["fp8"].from_tensors("w", "fp8_e4m3", floats, block).spec.scale_format.name == "f32"


@pytest.mark.parametrize(
    ("rows", "columns", "refused"),
    [(576, 512, False), (64, 64, False), (256, 384, False), (300, 512, True), (512, 192, True), (576, 192, False)],
)
def test_short_last_blocks_that_loaders_misread(rows, columns, refused):
    form = "fp8_e4m3{128x128}"
    scale, data = pt2mx.quantize_mx(torch.randn(rows, columns), form)
    if refused:
        with pytest.raises(MXError, match=rf"w is {rows} x {columns}, which loaders would divide into equal blocks"):
            LAYOUTS["fp8"].to_tensors("w", form, data, scale)
        return
    tensors = LAYOUTS["fp8"].to_tensors("w", form, data, scale)
    packed = LAYOUTS["fp8"].from_tensors("w", form, tensors, (128, 128))
    assert packed.spec == spec_of(form) and torch.equal(packed.data, data) and torch.equal(packed.scale, scale)


def test_rows_of_blocks():
    spec = spec_of("fp8_e4m3{128x128}")
    assert rows_of_scales("w", spec, torch.arange(256, 512)).tolist() == [2, 3]
    assert rows_of_scales("w", spec, torch.arange(128, 300)).tolist() == [1, 2]
    with pytest.raises(MXError, match="the rows of w are no whole blocks of 128 rows"):
        rows_of_scales("w", spec, torch.arange(64, 256))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted({key.partition("/")[0] for key in NVFP4_RECORDED.files}))
def test_nvfp4_tensors_equal_those_that_modelopt_recorded(name, dtype):
    x = torch.from_numpy(NVFP4_RECORDED[f"{name}/{dtype}/x"]).to(getattr(torch, dtype))
    codes, scale, factor = (
        torch.from_numpy(NVFP4_RECORDED[f"{name}/{dtype}/modelopt/{what}"]) for what in ("codes", "scale", "scale_2")
    )
    tensor_scale = pt2mx.tensor_scale_mx(x, NVFP4)
    scales, data = pt2mx.quantize_mx(x, NVFP4, tensor_scale=tensor_scale)
    tensors = LAYOUTS["modelopt"].to_tensors("fc.weight", NVFP4, data, scales, tensor_scale)
    assert torch.equal(tensors["fc.weight"], codes)
    assert torch.equal(tensors["fc.weight_scale"].view(torch.uint8), scale) and tensors["fc.weight_scale"].dtype == E4M3
    assert torch.equal(tensors["fc.weight_scale_2"], factor)
    back = LAYOUTS["modelopt"].from_tensors("fc.weight", NVFP4, tensors)
    values = torch.from_numpy(NVFP4_RECORDED[f"{name}/{dtype}/modelopt/dequantized"])
    assert torch.equal(pt2mx.dequantize_mx(*back[:3], tensor_scale=back.tensor_scale), values)


def test_the_error_of_inputs_names_the_layouts_that_hold_them():
    layout = LAYOUTS["compressed-tensors"]
    with pytest.raises(MXError, match=r"cannot say .* of fc are nvfp4.* nearest_flush; give the layout modelopt$"):
        layout.check_inputs("fc", "fp4_e2m1", pt2mx.parse("nvfp4"))
    with pytest.raises(MXError, match=r"give the layout quark; or quantize them to mxfp8_e4m3\{32\}\(rceil\)$"):
        layout.check_inputs("fc", "fp4_e2m1", pt2mx.parse("mxfp8"))
    with pytest.raises(MXError, match=r"cannot say that inputs of fc are mxint8.* with scale_mode nearest_flush$"):
        layout.check_inputs("fc", "fp4_e2m1", pt2mx.parse("mxint8"))
