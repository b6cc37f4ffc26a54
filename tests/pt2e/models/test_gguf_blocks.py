import numpy as np
import pytest
import torch

from pt2mx import MXError
from pt2mx.kernels.packing import unpack
from pt2mx.pt2e.models.gguf_blocks import BLOCK_TYPES

gguf = pytest.importorskip("gguf")

#: type -> the bytes that its scales may have: those with the same meaning in the file and here
_SCALE_BYTES = {"MXFP4": (0, 254), "NVFP4": (0, 126)}


def _blocks(name, rows=3, columns=4):
    """Return random blocks (rows, columns * bytes) with finite scales."""
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    row = BLOCK_TYPES[name]
    blocks = torch.randint(256, (rows, columns, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = blocks[..., : row.groups * row.spec.scale_format.dtype.itemsize]
    if name in _SCALE_BYTES:
        low, high = _SCALE_BYTES[name]
        scales.copy_(torch.arange(scales.numel()).view(scales.shape) * 5 % (high - low + 1) + low)
    else:
        scales.copy_(torch.randn(rows, columns).half().view(torch.uint8).view(scales.shape))
    return blocks.flatten(-2)


def _values(row, data, scale):
    """Return the values of codes and scales by their definition."""
    element = row.spec.element
    codes = (unpack(data, data.dim() - 1, 4) if element.bits == 4 else data).flatten().tolist()
    table = {code: _value(element, code) for code in set(codes)}
    values = torch.tensor([table[code] for code in codes]).view(*scale.shape, row.spec.block_size)
    if scale.dtype.is_floating_point:
        factor = scale.float()
    elif row.spec.has_e8m0_scale:
        factor = torch.exp2(scale.double() - 127).float()
    else:
        factor = scale.view(torch.float8_e4m3fn).float()
    return (values * factor.unsqueeze(-1)).flatten(-2)


def _value(element, code):
    if element.is_int:
        return float(code - (1 << element.bits) * (code >> (element.bits - 1)))
    magnitude = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7]
    return -magnitude if code & 8 else float(magnitude)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_codes_and_scales_have_the_values_of_gguf(name):
    row, blocks = BLOCK_TYPES[name], _blocks(name)
    data, scale = row.to_codes("weight", blocks)
    assert scale.dtype == row.spec.scale_format.dtype and scale.shape == (3, 4 * row.groups)
    expected = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    # gguf has no negative zero
    assert np.array_equal(_values(row, data, scale).numpy(), expected)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_restored(name):
    row, blocks = BLOCK_TYPES[name], _blocks(name)
    assert torch.equal(row.to_blocks("weight", *row.to_codes("weight", blocks)), blocks)
    experts = blocks.view(3, 1, -1)
    assert torch.equal(row.to_blocks("weight", *row.to_codes("weight", experts)), experts)


@pytest.mark.parametrize("name", ["MXFP4", "Q8_0", "Q4_0"])
def test_blocks_are_those_that_gguf_packs(name):
    """gguf's own codes of a weight, unpacked and packed again, have its bytes."""
    weight = torch.randn(4, 128, generator=torch.Generator().manual_seed(1))
    packed = torch.from_numpy(gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType[name]))
    row = BLOCK_TYPES[name]
    assert torch.equal(row.to_blocks("weight", *row.to_codes("weight", packed)), packed)


@pytest.mark.parametrize(("name", "position", "code"), [("MXFP4", 0, 255), ("NVFP4", 2, 127), ("NVFP4", 3, 200)])
def test_scales_with_another_meaning_are_refused(name, position, code):
    blocks = _blocks(name)
    blocks[0, position] = code
    with pytest.raises(MXError, match=f"^fc has a block with the scale {code}, which means another number in {name}"):
        BLOCK_TYPES[name].to_codes("fc", blocks)


def test_scales_of_inf_are_refused():
    blocks = _blocks("Q8_0")
    blocks[1, :2] = torch.tensor([float("inf")]).half().view(torch.uint8)
    with pytest.raises(MXError, match=r"^fc has a block with the scale inf"):
        BLOCK_TYPES["Q8_0"].to_codes("fc", blocks)


def test_rows_that_are_no_whole_blocks_are_refused():
    row = BLOCK_TYPES["NVFP4"]
    data, scale = row.to_codes("fc", _blocks("NVFP4"))
    with pytest.raises(MXError, match=r"^fc has 240 columns, and rows of NVFP4 are whole blocks of 64 values"):
        row.to_blocks("fc", data[:, :-8], scale[:, :-1])
