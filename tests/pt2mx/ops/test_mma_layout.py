import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F

from pt2mx import ELEMENTS, FORMATS, MXError, dequantize_mx, quantize_mx
from pt2mx.kernels.gpu.mma_layout import FRAGMENTS, _together, decode_ptx, exponent_shift, from_fragments, to_fragments
from pt2mx.ops.mma_layout import linear_mx_fragments


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
    fragments = to_fragments(data, scale, element, block_size)
    want = dequantize_mx(data, scale, name, block_size, torch.bfloat16, length=shape[1])
    got = from_fragments(*fragments, element, *shape)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    tiles, steps = -(-shape[0] // 16), -(-shape[1] // FRAGMENTS[name].step)
    assert fragments[0].numel() == tiles * 16 * steps * FRAGMENTS[name].step * element.bits // 8
    assert fragments[1].numel() == tiles * 16 * steps * FRAGMENTS[name].step // 32


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
    from pt2mx.kernels.packing import pack

    data, scale = pack(codes, 1, element.bits), torch.full((16, 8), 120, dtype=torch.uint8)
    fragments = to_fragments(data, scale, element, 32)
    want = dequantize_mx(data, scale, name, 32, torch.bfloat16)
    assert torch.equal(from_fragments(*fragments, element, 16, 256).view(torch.int16), want.view(torch.int16))


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
    assert to_fragments(data, scale, ELEMENTS[name], 32) is not None
    change(data, scale)
    assert to_fragments(data, scale, ELEMENTS[name], 32) is None


def test_formats_and_blocks_without_fragments():
    scale, data = quantize_mx(torch.randn(16, 64), "int4", 32)
    assert to_fragments(data, scale, ELEMENTS["int4"], 32) is None
    scale, data = quantize_mx(torch.randn(16, 64), "mxfp8", 16)
    assert to_fragments(data, scale, ELEMENTS["fp8_e4m3"], 16) is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*FORMATS, "fp8_e3m4", "int8_full"])
def test_product(name, bias):
    scale, data = quantize_mx(weight(20, 72), name)
    fragments = to_fragments(data, scale, ELEMENTS[name], 32)
    x = torch.randn(2, 3, 72, dtype=torch.bfloat16)
    bias = torch.randn(20, dtype=torch.bfloat16) if bias else None
    want = F.linear(x, dequantize_mx(data, scale, name, 32, torch.bfloat16, length=72), bias)
    assert torch.equal(linear_mx_fragments(x, *fragments, bias, name, 20), want)
    opcheck(linear_mx_fragments, (x, *fragments, bias, name, 20))


@pytest.mark.parametrize(
    ("x", "elem", "n", "message"),
    [
        (torch.randn(2, 64), "fp8_e4m3", 16, "bfloat16 x and bias"),
        (torch.randn(2, 63).bfloat16(), "fp8_e4m3", 16, "a K that 8 divides, not 63"),
        (torch.randn(2, 64).bfloat16(), "int4", 16, "no fragments of 'int4': allowed are fp4_e2m1"),
        (torch.randn(2, 64).bfloat16(), "fp8_e4m3", 17, r"no fragments of a \(17, 64\) weight"),
    ],
)
def test_bad_input(x, elem, n, message):
    scale, data = quantize_mx(torch.randn(16, 64), "mxfp8")
    fragments = to_fragments(data, scale, ELEMENTS["fp8_e4m3"], 32)
    with pytest.raises(MXError, match=message):
        linear_mx_fragments(x, *fragments, None, elem, n)


def test_ptx_masks_each_pair_in_place():
    text = decode_ptx(ELEMENTS["fp4_e2m1"])
    assert text.count("and.b32") == 16 and text.count("lop3.b32") == 2 * 2 * 2  # of 16 pairs four are of three pieces
    assert exponent_shift(ELEMENTS["fp4_e2m1"]) == 126 and exponent_shift(ELEMENTS["int8"]) == 0


_INTEGER_INSTRUCTIONS = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[table],
}


@pytest.mark.parametrize("name", [name for name, fragment in FRAGMENTS.items() if fragment.pairs])
def test_ptx_gathers_the_pairs_that_the_definition_does(name):
    """Run instruction by instruction; the scale of each pair is its own."""
    fragment = FRAGMENTS[name]
    outputs, words = fragment.values // 2, torch.randint(-(2**31), 2**31, (1, fragment.words), dtype=torch.int64)
    registers = {f"${outputs + i}": int(word) & 0xFFFFFFFF for i, word in enumerate(words[0])}
    pairs = {}
    for line in decode_ptx(ELEMENTS[name]).split(";"):
        instruction, _, rest = line.strip().partition(" ")
        target, *operands = rest.split(", ")
        if instruction in _INTEGER_INSTRUCTIONS:
            values = [registers[o] if o in registers else int(o, 0) for o in operands]
            registers[target] = _INTEGER_INSTRUCTIONS[instruction](*values)
        elif instruction == "fma.rn.bf16x2":
            pairs[target] = registers[operands[0]]
            scale = int(operands[1].removeprefix("$")) - outputs - fragment.words
            assert scale == 4 * ((len(pairs) - 1) * fragment.scales // outputs)
    halves = _together(words.to(torch.int32), fragment).view(-1, 2).to(torch.int64) & 0xFFFF
    assert [pairs[f"${i}"] for i in range(outputs)] == (halves[:, 0] | halves[:, 1] << 16).tolist()
