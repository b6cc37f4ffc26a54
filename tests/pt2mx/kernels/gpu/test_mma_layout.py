"""The codes of a weight in the order of a GPU's tensor cores, on the CPU: nothing is lost on the way."""

import pytest
import torch

from pt2mx import ELEMENTS, FORMATS, MXSpec, dequantize_mx, quantize_mx
from pt2mx.kernels import float_scales, reference
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, exponent_shift, from_mma_layout, to_mma_layout
from pt2mx.kernels.packing import pack
from tests.compare import same


def weight(n, k):
    w = torch.randn(n, k) * torch.randn(n, 1).exp() * 1e-2
    w[0] = 0
    w[-1] *= 2.0**-95  # towards the lower end of the scales
    return w


@pytest.mark.diagonal
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("shape", [(1, 8), (16, 128), (40, 200), (33, 520), (4100, 32)])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments_hold_the_weight_to_the_bit(name, shape, block_size):
    scale, data = quantize_mx(weight(*shape), name, block_size)
    element = ELEMENTS[name]
    fragments = to_mma_layout(data, scale, MXSpec(name, block_size))
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
    fragments = to_mma_layout(data, scale, MXSpec(name))
    want = dequantize_mx(data, scale, name, 32, torch.bfloat16)
    assert torch.equal(from_mma_layout(*fragments, element, 16, 256).view(torch.int16), want.view(torch.int16))


#: elements whose values times scales of four significant bits bfloat16 represents
TIMES_E4M3 = [name for name in FRAGMENTS if ELEMENTS[name].mantissa_bits <= 3]


@pytest.mark.diagonal
@pytest.mark.parametrize("scale_format", ["e4m3", "e5m3", "f32"])
@pytest.mark.parametrize("name", TIMES_E4M3)
def test_every_code_with_every_scale(name, scale_format):
    """Subnormal scales, and those of zero, whose values are zero."""
    element, spec = ELEMENTS[name], MXSpec(name, 16, 1, scale_format=scale_format)
    most = 1 << element.bits - 1
    codes = torch.arange(512, dtype=torch.int32).repeat(127, 1) % (2 * most)
    codes = torch.where((codes & most - 1) > element.max_code, 1, codes)
    codes = pack(codes, 1, element.bits)
    scale = torch.arange(127).to(torch.uint8) + (16 if scale_format == "e5m3" else 0)
    if scale_format == "f32":
        scale = float_scales.value_of(scale.to(torch.int32), spec.replace(scale_format="e4m3"))
    scale = scale.unsqueeze(1).repeat(1, 32)
    fragments = to_mma_layout(codes, scale, spec)
    assert fragments[1].shape[4:] == (32, 2)
    want = reference.dequantize(codes, scale, spec, torch.bfloat16, 512)
    assert same(from_mma_layout(*fragments, element, 127, 512), want)
    want = reference.dequantize(codes, scale, spec, torch.float32, 512)
    t = torch.tensor(2.0**-7)
    assert same(from_mma_layout(*fragments, element, 127, 512, t), (want * t).bfloat16())


@pytest.mark.parametrize(("scale_format", "code"), [("e4m3", 0x7F), ("e4m3", 0x81), ("e4m3", 0x80), ("e5m3", 1)])
def test_scales_without_a_byte(scale_format, code):
    """NaN, negative ones, and one below 2**-16."""
    data, scale = torch.zeros(16, 32, dtype=torch.uint8), torch.full((16, 4), 0x30, dtype=torch.uint8)
    spec = MXSpec("fp4_e2m1", 16, scale_format=scale_format)
    assert to_mma_layout(data, scale, spec) is not None
    scale[3, 2] = code
    assert to_mma_layout(data, scale, spec) is None


def test_elements_and_blocks_that_scales_with_a_significand_do_not_fit():
    data, scale = torch.zeros(16, 64, dtype=torch.uint8), torch.full((16, 8), 0x30, dtype=torch.uint8)
    assert to_mma_layout(data, scale, MXSpec("int8", 16, scale_format="e4m3")) is None
    assert to_mma_layout(data, scale, MXSpec("fp8_e3m4", 16, scale_format="e4m3")) is None
    assert to_mma_layout(data, scale, MXSpec("fp8_e4m3", 8, scale_format="e4m3")) is None


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
    assert to_mma_layout(data, scale, MXSpec(name)) is not None
    change(data, scale)
    assert to_mma_layout(data, scale, MXSpec(name)) is None


def test_formats_and_blocks_without_fragments():
    scale, data = quantize_mx(torch.randn(16, 64), "int4", 32)
    assert to_mma_layout(data, scale, MXSpec("int4")) is None
    scale, data = quantize_mx(torch.randn(16, 64), "mxfp8", 16)
    assert to_mma_layout(data, scale, MXSpec("fp8_e4m3", 16)) is None


def test_exponent_shift():
    assert exponent_shift(ELEMENTS["fp4_e2m1"]) == 126 and exponent_shift(ELEMENTS["int8"]) == 0
