"""The codes of a weight in the order of a GPU's tensor cores, on the CPU: nothing is lost on the way."""

import pytest
import torch

from pt2mx import ELEMENTS, FORMATS, dequantize_mx, quantize_mx
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, exponent_shift, from_mma_layout, to_mma_layout
from pt2mx.kernels.packing import pack


def weight(n, k):
    w = torch.randn(n, k) * torch.randn(n, 1).exp() * 1e-2
    w[0] = 0
    w[-1] *= 2.0**-95  # towards the lower end of the scales
    return w


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("shape", [(1, 8), (16, 128), (40, 200), (33, 520), (4100, 32)])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments_hold_the_weight_to_the_bit(name, shape, block_size):
    scale, data = quantize_mx(weight(*shape), name, block_size)
    element = ELEMENTS[name]
    fragments = to_mma_layout(data, scale, element, block_size)
    want = dequantize_mx(data, scale, name, block_size, torch.bfloat16, length=shape[1])
    got = from_mma_layout(*fragments, element, *shape)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    tiles, steps = -(-shape[0] // 16), -(-shape[1] // FRAGMENTS[name].k_step)
    assert fragments[0].numel() == tiles * 16 * steps * FRAGMENTS[name].k_step * element.bits // 8
    assert fragments[1].numel() == tiles * 16 * steps * FRAGMENTS[name].k_step // 32


def test_every_format_of_8_bits_has_fragments():
    """Whatever rows the table gets."""
    assert {name for name, element in ELEMENTS.items() if element.bits == 8} | set(FORMATS) <= set(FRAGMENTS)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_code_survives(name):
    element = ELEMENTS[name]
    count = 1 << element.bits
    codes = torch.arange(256, dtype=torch.int32).repeat(16, 1) % count
    if not element.is_int:  # finite ones
        codes = torch.where((codes & count // 2 - 1) > element.max_code, 1, codes)
    data, scale = pack(codes, 1, element.bits), torch.full((16, 8), 120, dtype=torch.uint8)
    fragments = to_mma_layout(data, scale, element, 32)
    want = dequantize_mx(data, scale, name, 32, torch.bfloat16)
    assert torch.equal(from_mma_layout(*fragments, element, 16, 256).view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("name", [name for name, fragment in FRAGMENTS.items() if fragment.pairs])
def test_pieces_use_every_bit_of_the_words_once(name):
    words = {}
    for pieces in FRAGMENTS[name].pairs:
        target = 0
        for word, left, mask in pieces:
            bits = mask >> left if left > 0 else mask << -left
            assert bits < 1 << 16 and not bits & words.get(word, 0) and not mask & target
            words[word], target = words.get(word, 0) | bits, target | mask
        element = ELEMENTS[name]
        assert target == 1 << 15 | (1 << element.bits - 1) - 1 << 7 - element.mantissa_bits
    assert set(words.values()) == {0xFFFF}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fp4_e2m1", lambda data, scale: scale.fill_(255)),  # NaN
        ("fp4_e2m1", lambda data, scale: scale[3, 1:].fill_(129)),
        ("fp6_e3m2", lambda data, scale: scale[3, 1:].fill_(131)),
        ("fp8_e4m3", lambda data, scale: data[5, 5:6].fill_(0x7F)),  # NaN
        ("fp8_e5m2", lambda data, scale: data[5, 5:6].fill_(0xFC)),  # -Inf
        ("fp8_e5m2", lambda data, scale: scale[5, 1:].fill_(0)),  # 2**-127, which no factor is
    ],
)
def test_weights_that_fragments_cannot_hold(name, change):
    scale, data = quantize_mx(torch.randn(16, 64), name)
    assert to_mma_layout(data, scale, ELEMENTS[name], 32) is not None
    change(data, scale)
    assert to_mma_layout(data, scale, ELEMENTS[name], 32) is None


def test_formats_and_blocks_without_fragments():
    scale, data = quantize_mx(torch.randn(16, 64), "int4", 32)
    assert to_mma_layout(data, scale, ELEMENTS["int4"], 32) is None
    scale, data = quantize_mx(torch.randn(16, 64), "mxfp8", 16)
    assert to_mma_layout(data, scale, ELEMENTS["fp8_e4m3"], 16) is None


def test_exponent_shift():
    assert exponent_shift(ELEMENTS["fp4_e2m1"]) == 126 and exponent_shift(ELEMENTS["int8"]) == 0
