"""Compare the reference kernel with exact rational arithmetic, and check its own promises."""

import functools
import itertools
import math
import random
import struct

import pytest
import torch

from mx_conformance.exact import code_values, grid, quantize_block
from pt2mx import ELEMENTS, FORMATS, MXSpec, dequantize_mx, fake_quantize_mx, quantize_mx
from pt2mx.kernels import reference
from pt2mx.modes import ROUNDINGS
from tests.oracle import NARROW, WIDE, modes_of
from tests.own_formats import OWN

pytestmark = pytest.mark.usefixtures("own_elements")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def float32(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern & 0xFFFFFFFF))[0]


@functools.cache
def float_grid(element) -> list[float]:
    return [float(value) for value in grid(element)]


def adversarial_blocks(element, seed: int, count: int) -> list[list[float]]:
    """Blocks of 4 around the critical values: powers of two, the format's largest value, ties, subnormals, the top
    binade."""
    rng = random.Random(seed)
    values = float_grid(element)
    blocks = []
    for _ in range(count):
        k = rng.choice([-149, -140, -130, -127, -126, -120, -60, -1, 0, 1, 60, 110, 118, 119, 120, 125, 126, 127])
        k = min(k, 127)
        block = []
        for _ in range(4):
            kind = rng.randrange(6)
            if kind == 0:
                value = 2.0**k
            elif kind == 1:
                value = element.max_normal * 2.0**k
            elif kind == 2:  # a tie between two neighbours of the grid
                i = rng.randrange(len(values) - 1)
                value = (values[i] + values[i + 1]) / 2 * 2.0**k
            elif kind == 3:
                value = rng.uniform(0, 2) * 2.0**k
            elif kind == 4:
                value = 0.0
            else:
                value = float32(rng.getrandbits(31))
            if not math.isfinite(value) or abs(value) > 3.4e38:
                value = 3.4e38
            pattern = struct.unpack("<I", struct.pack("<f", value))[0] + rng.choice([-1, 0, 0, 0, 1])
            value = float32(max(0, min(pattern, 0x7F7FFFFF)))
            block.append(rng.choice([-1, 1]) * value)
        blocks.append(block)
    return blocks


@pytest.mark.compiled_cases(
    "fp5_*",
    "fp7_*",
    "int5*",
    "int7*",
    "int9",
    "int16*",
    "fp9_e7m1",
    "fp16_e1m14",
    "fp16_e7m8",
    "own_e4m3",
    "own_e5m2",
    "own_int*",
    "own_large",
)
@pytest.mark.parametrize("name", [*NARROW, *WIDE, *OWN])
def test_equals_exact_arithmetic_on_adversarial_blocks(name):
    """Every scale mode with every rounding; more blocks for the formats of the specification."""
    for i, (scale_mode, rounding) in enumerate(itertools.product(modes_of(name), ROUNDINGS)):
        blocks = adversarial_blocks(ELEMENTS[name], seed=100 * len(name) + i, count=15 if name in FORMATS else 10)
        blocks += [[math.inf, 1.0, 2.0, 0.0], [math.nan, 1.0, 2.0, 0.0], [0.0, -0.0, 0.0, -0.0]]
        spec = MXSpec(name, 4, 1, scale_mode, rounding)
        check_against_oracle(torch.tensor(blocks), spec, seed=i)


@pytest.mark.compiled_except("fp4_e2m1-*", "fp8_e4m3-*", "*-even")
@pytest.mark.parametrize(("name", "scale_mode"), [(name, mode) for name in FORMATS for mode in modes_of(name)])
def test_equals_exact_arithmetic_on_random_blocks(name, scale_mode):
    x = torch.randn(6, 32) * torch.logspace(-30, 30, 6).unsqueeze(1)
    for i, rounding in enumerate(ROUNDINGS):
        check_against_oracle(x, MXSpec(name, 32, 1, scale_mode, rounding), seed=2**62 + i)


def check_against_oracle(x: torch.Tensor, spec: MXSpec, seed: int) -> None:
    """x: (blocks, block_size) fp32."""
    scale, codes = quantize_mx(x, spec, seed=seed)
    unpacked = reference.unpack(codes, 1, spec.element.bits)[:, : x.shape[1]]
    got = fake_quantize_mx(x, spec, seed=seed)
    for i, block in enumerate(x.tolist()):
        want_scale, want_codes, want = quantize_block(
            block, spec.element, spec.scale_mode, spec.rounding, seed, i * x.shape[1]
        )
        assert scale[i].item() == want_scale, (spec, block)
        assert unpacked[i].tolist() == want_codes, (spec, block)
        # the top binade may round to 2**128, which fp32 holds as Inf
        want = torch.tensor(want, dtype=torch.float64).to(torch.float32)
        if want_scale == 0xFF:
            assert got[i].isnan().all(), (spec, block)
        else:
            assert torch.equal(bits(got[i]), bits(want)), (spec, block, got[i], want)


@pytest.mark.diagonal
@pytest.mark.parametrize("scale_exp_bits", [1, 2, 5, 7, 9, 11])
@pytest.mark.parametrize("name", ["fp4_e2m1", "fp8_e4m3", "int8", "fp8_e7m0", "fp16_e5m10"])
def test_other_widths_of_the_scale_equal_exact_arithmetic(name, scale_exp_bits):
    for i, (scale_mode, rounding) in enumerate(itertools.product(modes_of(name), ROUNDINGS)):
        spec = MXSpec(name, 4, 1, scale_mode, rounding, scale_exp_bits)
        x = torch.tensor(adversarial_blocks(spec.element, seed=i, count=8))
        got = fake_quantize_mx(x, spec, seed=i)
        for row, block in enumerate(x.tolist()):
            modes = (scale_mode, rounding, i, 4 * row, scale_exp_bits)
            want = torch.tensor(quantize_block(block, spec.element, *modes)[2], dtype=torch.float64)
            assert torch.equal(bits(got[row]), bits(want.to(torch.float32))), (spec, block)


@pytest.mark.parametrize("name", [*FORMATS, *(name for name in OWN if name != "own_int12")])
def test_every_code_under_every_scale(name):
    element = ELEMENTS[name]
    codes = torch.arange(1 << element.bits, dtype=torch.int32)
    data = reference.pack(codes.expand(256, -1), 1, element.bits)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    got = dequantize_mx(data, scale, name, len(codes), length=len(codes))
    want = torch.tensor(code_values(element), dtype=torch.float64) * torch.tensor(
        [2.0 ** (b - 127) for b in range(256)], dtype=torch.float64
    ).unsqueeze(1)
    want[255] = math.nan
    assert torch.equal(
        bits(got.nan_to_num(7.0, posinf=math.inf, neginf=-math.inf)),
        bits(want.float().nan_to_num(7.0, posinf=math.inf, neginf=-math.inf)),
    )


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*FORMATS, *OWN])
def test_every_16_bit_pattern_in_a_block_of_one(name, dtype):
    """16-bit inputs are computed in fp32, and the result is rounded once, ties to even."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).unsqueeze(1)
    for scale_mode in modes_of(name):
        got = fake_quantize_mx(patterns, name, 1, scale_mode=scale_mode)
        want = fake_quantize_mx(patterns.float(), name, 1, scale_mode=scale_mode)
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(0).view(torch.int16), want.to(dtype).nan_to_num(0).view(torch.int16))
        scale, data = quantize_mx(patterns, name, 1, scale_mode=scale_mode)
        again = dequantize_mx(data, scale, name, 1, dtype, length=1)
        assert torch.equal(again.nan_to_num(0).view(torch.int16), got.nan_to_num(0).view(torch.int16))


def test_bf16_is_computed_in_fp32():
    """The exponent of a bf16 amax plus half a unit in the last place needs more than bf16's eight bits."""
    x = torch.tensor([[1.9921875, 0.013]], dtype=torch.bfloat16)
    want = fake_quantize_mx(x.float(), "int8", 2, scale_mode="even").bfloat16()
    assert torch.equal(fake_quantize_mx(x, "int8", 2, scale_mode="even"), want)


def test_just_below_a_tie_rounds_down():
    """floor(x + 0.5) would round 0.49999997 of a step up."""
    x = torch.tensor([[4.0, 0.5 * 0.49999997, -0.5 * 0.49999997, 0.25]])  # fp4: a step of 0.5 below 2
    assert fake_quantize_mx(x, "fp4_e2m1", 4).tolist() == [[4.0, 0.0, -0.0, 0.0]]


def test_exponent_one_ulp_below_a_power_of_two():
    """A rounded log2 gives 3 for the float just below 8."""
    below = torch.nextafter(torch.tensor(8.0), torch.tensor(0.0))
    scale, _ = quantize_mx(below.reshape(1), "fp4_e2m1", 1)
    assert scale.item() == 127 + 2 - 2
    scale, _ = quantize_mx(torch.tensor([8.0]), "fp4_e2m1", 1)
    assert scale.item() == 127 + 3 - 2


@pytest.mark.parametrize("name", [*FORMATS, *OWN])
def test_signed_zeros_and_zero_blocks(name):
    x = torch.tensor([[0.0, -0.0, 0.0, -0.0], [1.0, -0.0, 1e-9, -1e-9]])
    scale, _ = quantize_mx(x, name, 4)
    assert scale[0].item() == 0
    y = fake_quantize_mx(x, name, 4)
    if ELEMENTS[name].is_int or ELEMENTS[name].values:  # two's complement and codebooks have no negative zero
        assert not (y[0].signbit() | y[1].signbit() & (y[1] == 0)).any()
    else:
        assert torch.equal(y.signbit(), x.signbit())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_inf_or_nan_becomes_nan_and_no_other(bad):
    x = torch.ones(2, 64)
    x[1, 40] = bad
    for name in (*FORMATS, *OWN):
        scale, data = quantize_mx(x, name)
        assert scale.tolist()[0] == [scale[0, 0].item()] * 2 and scale[1, 1].item() == 0xFF
        y = dequantize_mx(data, scale, name)
        assert y[1, 32:].isnan().all() and not y[0].isnan().any() and not y[1, :32].isnan().any()
        assert torch.equal(fake_quantize_mx(x, name).isnan(), y.isnan())


def test_saturation_comes_before_any_cast():
    """E5M2 has an Inf that a plain cast would produce."""
    x = torch.tensor([[2.0**15 * 1.99, 1.0]])
    assert fake_quantize_mx(x, "fp8_e5m2", 2).tolist() == [[57344.0, 1.0]]
    assert quantize_mx(x, "fp8_e5m2", 2)[1][0, 0].item() == 0x7B


def test_the_gradient_stops_beyond_the_largest_value_and_not_at_it():
    x, spec = torch.tensor([[6.0, -6.0], [7.0, -7.0]]), MXSpec("fp4_e2m1", 2, 1, "floor", "even")
    assert reference.clip_gradient(torch.ones(2, 2), x, spec).tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("scale_mode", ["ceil", "rceil", "even", "doubled"])
def test_top_binade_keeps_its_scale_finite(scale_mode):
    largest = torch.finfo(torch.float32).max
    scale, _ = quantize_mx(torch.tensor([largest]), "int8", 1, scale_mode=scale_mode)
    assert scale.item() == 254
    scale, _ = quantize_mx(torch.tensor([largest]), "fp8_e4m3", 1, scale_mode=scale_mode)
    assert scale.item() == 127 + 128 - 8


def test_smallest_scale_survives_flushed_denormals():
    """2**-127 is an fp32 subnormal; applied in one step it would be flushed."""
    scale, data = torch.zeros(1, 1, dtype=torch.uint8), torch.tensor([[0x7E]], dtype=torch.uint8)
    value = 448 * 2.0**-127
    torch.set_flush_denormal(True)
    try:
        assert dequantize_mx(data, scale, "fp8_e4m3", 1).item() == value
        assert fake_quantize_mx(torch.tensor([value]), "fp8_e4m3", 1).item() == value
        assert fake_quantize_mx(torch.tensor([3.0e38, 1.5e38]), "int8", 2).isfinite().all()
    finally:
        torch.set_flush_denormal(False)


SHAPES = [((5, 70), -1), ((5, 70), 0), ((3, 33, 4), 1), ((2, 40, 3, 3), 1), ((7,), 0), ((1, 1), 1), ((0, 8), 0),
          ((0, 8), 1), ((4, 0), 1), ((2, 64), -2)]  # fmt: skip


@pytest.mark.diagonal
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("block_size", [1, 3, 32, 1000])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp6_e2m3", "fp4_e2m1", "int8"])
def test_shapes_blocks_and_axes(shape, axis, block_size, name):
    """Each block equals the same block quantized by itself, wherever it lies; fake quantization takes the same way."""
    x = torch.randn(shape)
    scale, data = quantize_mx(x, name, block_size, axis)
    length, positive = shape[axis], axis % len(shape)
    blocks = -(-length // block_size)
    assert scale.shape == torch.Size([*shape[:positive], blocks, *shape[positive + 1 :]])
    per_group, size = {"fp6_e2m3": (4, 3), "fp4_e2m1": (2, 1)}.get(name, (1, 1))
    assert data.shape[positive] == -(-length // per_group) * size
    assert scale.dtype == data.dtype == torch.uint8 and scale.is_contiguous() and data.is_contiguous()
    y = dequantize_mx(data, scale, name, block_size, axis=axis, length=length)
    assert torch.equal(bits(y), bits(fake_quantize_mx(x, name, block_size, axis)))
    if x.numel() == 0:
        return
    rows, want = x.movedim(axis, -1).reshape(-1, length), y.movedim(axis, -1).reshape(-1, length)
    for start in range(0, length, block_size):
        part = rows[:, start : start + block_size]
        alone = fake_quantize_mx(part.contiguous(), name, part.shape[1])
        assert torch.equal(bits(alone), bits(want[:, start : start + block_size].contiguous()))


def test_layouts_do_not_change_values():
    x = torch.randn(2, 40, 6, 6)
    want = fake_quantize_mx(x, "mxfp4", axis=1)
    for other in (x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        assert torch.equal(fake_quantize_mx(other, "mxfp4", axis=1), want)
        for a, b in zip(quantize_mx(other, "mxfp4", axis=1), quantize_mx(x, "mxfp4", axis=1), strict=True):
            assert torch.equal(a, b)
    row = torch.randn(1, 64)
    assert torch.equal(fake_quantize_mx(row.expand(3, 64), "mxfp6"), fake_quantize_mx(row, "mxfp6").expand(3, 64))


def test_zero_dimensional():
    assert fake_quantize_mx(torch.tensor(3.3), "mxfp4").item() == 3.0
    assert fake_quantize_mx(torch.tensor(3.3), "mxfp4").shape == ()
    scale, data = quantize_mx(torch.tensor(3.3), "mxfp4", axis=0)
    assert dequantize_mx(data, scale, "mxfp4", length=1).tolist() == [3.0]


def test_scale_reads_as_e8m0():
    scale, _ = quantize_mx(torch.full((1, 32), 3.0), "fp4_e2m1")
    assert scale.view(torch.float8_e8m0fnu).float().item() == 0.5


def test_shared_exponent_of_subnormal_blocks_with_emax_zero():
    """int8 is the one format that tells 2**-127 from 2**-126."""
    spec = MXSpec("int8", 1, 1)
    for mantissa, mode, byte in [
        (0x400000, "ceil", 0),
        (0x400001, "ceil", 1),
        (0x7FFFFF, "floor", 0),
        (0x3FFFFF, "ceil", 0),
        (0x7F0000, "rceil", 0),
        (0x7F0001, "rceil", 1),
        (0x3FFFFF, "doubled", 0),
        (0x400000, "doubled", 1),
    ]:
        scale, _ = quantize_mx(torch.tensor([[float32(mantissa)]]), spec.replace(scale_mode=mode))
        assert scale.item() == byte, (hex(mantissa), mode)
