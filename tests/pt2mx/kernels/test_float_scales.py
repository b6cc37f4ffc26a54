"""Scales with a significand, against fractions that are rounded where float32 rounds; blocks of several rows."""

import itertools
import math
import random
import struct

import pytest
import torch

from pt2mx import ELEMENTS, SCALE_FORMATS, MXSpec, dequantize_mx, fake_quantize_mx, parse, quantize_mx, tensor_scale_mx
from pt2mx.kernels import reference, reference_chunked
from pt2mx.kernels.float_scales import codes_of
from pt2mx.modes import FLOAT_SCALE_MODES, ROUNDINGS
from pt2mx.scale_formats import TENSOR_SCALE_RANGE
from tests.float_scale_oracle import quantize_block

FLOATS = [name for name, f in SCALE_FORMATS.items() if not f.is_power_of_two]


pytestmark = pytest.mark.usefixtures("own_elements")


def float32(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


def adversarial_blocks(element, largest: float, seed: int, count: int) -> list[list[float]]:
    """Blocks of 4: powers of two, the element's largest value times scales, subnormals, huge values, any pattern."""
    rng, blocks = random.Random(seed), []
    for _ in range(count):
        k = rng.choice([-149, -127, -126, -60, -20, -10, -7, -6, -1, 0, 1, 3, 8, 20, 60, 126])
        block = []
        for _ in range(4):
            kind = rng.randrange(6)
            value = (
                [2.0**k, element.max_normal * 2.0**k, rng.uniform(0, largest), 0.0, rng.uniform(0, 2) * 2.0**k][kind]
                if kind < 5
                else float32(rng.getrandbits(31))
            )
            if not math.isfinite(value) or abs(value) > 3.4e38:
                value = 3.4e38
            block.append(rng.choice([-1, 1]) * float32(struct.unpack("<I", struct.pack("<f", value))[0]))
        blocks.append(block)
    return [*blocks, [math.inf, 1.0, 2.0, 0.0], [math.nan, 1.0, 2.0, 0.0], [0.0, -0.0, 0.0, -0.0]]


@pytest.mark.compiled_except(
    "e4m3-*",
    "e4m3_f32-nearest",
    "e4m3_f32-rceil",
    "e4m3_f32-four_six",
    "e4m3_f32-mse",
    "e5m3-four_six",
    "f32-mse",
    "bf16-rceil",
)
@pytest.mark.parametrize("mode", FLOAT_SCALE_MODES)
@pytest.mark.parametrize("scale_format", FLOATS)
def test_equals_arithmetic_in_fractions(scale_format, mode):
    f = SCALE_FORMATS[scale_format]
    cases = itertools.product(("fp4_e2m1", "fp8_e4m3", "int4", "int8_full", "own_nf4", "own_int6"), ROUNDINGS)
    for seed, (name, rounding) in enumerate(cases):
        element = ELEMENTS[name]
        spec = MXSpec(name, 4, 1, mode, rounding, scale_format=f)
        largest = element.max_normal * 300
        x = torch.tensor(adversarial_blocks(element, largest, seed, 4))
        scales = [tensor_scale_mx(x[:4].clamp(-largest, largest), spec), torch.tensor(0.01)] if f.tensor else [None]
        for t in scales:
            scale, data = quantize_mx(x, spec, seed=seed, tensor_scale=t)
            codes = reference.unpack(data, 1, element.bits)[:, :4]
            got, stored = fake_quantize_mx(x, spec, seed=seed, tensor_scale=t), codes_of(scale)
            again = dequantize_mx(data, scale, spec, length=4, tensor_scale=t)
            assert torch.equal(again.nan_to_num(7), got.nan_to_num(7)), spec
            for i, block in enumerate(x.tolist()):
                number = 1.0 if t is None else t.item()
                want = quantize_block(block, element, f, mode, rounding, number, seed, 4 * i)
                assert (stored[i].item(), codes[i].tolist()) == want[:2], (str(spec), t, block)
                values = torch.tensor(want[2], dtype=torch.float64).float()
                if stored[i] == f.nan:
                    assert got[i].isnan().all()
                else:
                    assert torch.equal(got[i].view(torch.int32), values.view(torch.int32)), (str(spec), t, block)


@pytest.mark.parametrize("quantize", [reference.quantize, lambda x, spec, **t: quantize_mx(x, spec, **t)])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("text", ["nvfp4", "nvfp4(mse)", "fp8_e4m3{16}(f32)", "int4{16}(bf16)", "fp4{16}(rceil,e5m3)"])
def test_inf_and_nan_make_their_block_nan_alone(text, value, quantize):
    spec = parse(text, axis=1)
    options = {"tensor_scale": torch.tensor(1.0)} if spec.scale_format.tensor else {}
    x = torch.linspace(-3, 3, 32).reshape(1, 32)
    x[0, 3] = value
    scale, data = quantize(x, spec, **options)
    values = reference.dequantize(data, scale, spec, torch.float32, 32, **options)
    assert values[0, :16].isnan().all() and values[0, 16:].isfinite().all()


@pytest.mark.parametrize("mode", ["four_six", "mse"])
def test_searches_lose_less(mode):
    x = torch.randn(200, 64)
    error = {m: (fake_quantize_mx(x, "nvfp4", scale_mode=m) - x).double().square().sum() for m in ("nearest", mode)}
    assert error[mode] < 0.9 * error["nearest"]


def test_rceil_saturates_nothing():
    x = torch.randn(500, 16).mul(7).exp().clamp(0.1, 600)
    top = x == x.amax(1, keepdim=True)
    for scale_format in FLOATS:
        y = fake_quantize_mx(x, MXSpec("fp4_e2m1", 16, scale_mode="rceil", scale_format=scale_format))
        assert (y >= x * (1 - 1 / 6))[top].all(), scale_format  # the element's largest step is a third of its value


def test_four_six_leaves_room_for_the_larger_scale():
    x = torch.randn(4, 64)
    room = tensor_scale_mx(x, "nvfp4", scale_mode="four_six") / tensor_scale_mx(x, "nvfp4")
    assert room.item() == pytest.approx(448 / 256)
    assert quantize_mx(torch.tensor([4.0, 3.0, 2.0, 1.0]), "fp4{4}(four_six,f32)")[0].item() == 1.0  # 4 on the grid
    assert quantize_mx(torch.tensor([6.0, 3.0, 2.0, 1.0]), "fp4{4}(four_six,f32)")[0].item() == 1.0


@pytest.mark.diagonal
@pytest.mark.parametrize("rows", [1, 2, 5, 128])
@pytest.mark.parametrize(
    "text", ["mxfp4{8}", "mxfp6{32}(mse)", "fp8_e4m3{8}(f32)", "nvfp4{16}(four_six)", "int4{8}(bf16)"]
)
@pytest.mark.parametrize(
    ("shape", "axis"), [((7, 20), 1), ((7, 20), 0), ((3, 6, 9), 1), ((4, 6, 2, 3), 1), ((0, 8), 1)]
)
def test_blocks_of_rows_equal_the_same_values_in_one_row(shape, axis, text, rows):
    spec = parse(text, axis=axis, block_rows=rows)
    x = torch.randn(shape)
    t = tensor_scale_mx(x, spec) if spec.scale_format.tensor else None
    scale, data = quantize_mx(x, spec, tensor_scale=t)
    y = dequantize_mx(data, scale, spec, length=shape[axis], tensor_scale=t)
    assert torch.equal(y, fake_quantize_mx(x, spec, tensor_scale=t))
    row_axis = spec.row_axis(x.dim()) if rows > 1 else 0 if axis == 1 else 1
    want_shape = list(shape)
    want_shape[axis] = -(-shape[axis] // spec.block_size)
    if rows > 1:
        want_shape[row_axis] = -(-shape[row_axis] // rows)
    assert list(scale.shape) == want_shape
    if not x.numel():
        return
    z, w = (v.movedim((row_axis, axis), (-2, -1)) for v in (x, y))
    z, w = z.reshape(-1, *z.shape[-2:]), w.reshape(-1, *w.shape[-2:])
    corners = range(len(z)), range(0, z.shape[1], rows), range(0, z.shape[2], spec.block_size)
    for i, r, c in itertools.product(*corners):
        block = z[i, r : r + rows, c : c + spec.block_size]
        alone = fake_quantize_mx(
            block.reshape(-1), spec.replace(axis=0, block_rows=1, block_size=block.numel()), tensor_scale=t
        )
        assert torch.equal(alone.reshape(block.shape), w[i, r : r + rows, c : c + spec.block_size])


def test_slices_of_large_tensors_keep_blocks_together(monkeypatch):
    x = torch.randn(70, 40)
    for text in (
        "mxfp8{16x32}",
        "fp8_e4m3{32x128}(f32)",
        "fp8_e4m3{9223372036854775807xrow}(f32)",
        "fp8_e4m3{row}(f32)",
    ):
        spec = parse(text, axis=1)
        want, (scale, data) = reference.fake_quantize(x, spec), reference.quantize(x, spec)
        monkeypatch.setattr(reference_chunked, "_VALUES", 200)
        assert torch.equal(reference_chunked.fake_quantize(x, spec, None), want)
        got = reference_chunked.quantize(x, spec, None)
        assert torch.equal(got[0], scale) and torch.equal(got[1], data)
        assert torch.equal(reference_chunked.dequantize(data, scale, spec, torch.float32, 40), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_are_computed_in_float32(dtype):
    x = torch.randn(5, 48).to(dtype)
    for text in ("nvfp4", "int4{16}(f16)", "fp8_e4m3{row}(f32)"):
        assert torch.equal(fake_quantize_mx(x, text), fake_quantize_mx(x.float(), text).to(dtype))


def test_gradient_is_zero_where_a_value_saturates():
    x = torch.tensor([[1.0, 2.0, 3.0, 700.0]], requires_grad=True)
    fake_quantize_mx(x, "fp4{4}(e4m3)", ste="clipped", tensor_scale=None).sum().backward()
    assert x.grad.tolist() == [[1.0] * 4]  # 700 / 6 rounds up to a scale of 120
    x = torch.tensor([[1.0, 2.0, 3.0, 60000.0]], requires_grad=True)
    fake_quantize_mx(x, "fp4{4}(e4m3)", ste="clipped").sum().backward()
    assert x.grad.tolist() == [[1.0, 1.0, 1.0, 0.0]]


#: compiled among the operators by default, in tests/pt2mx/ops/test_inductor_float_scales.py
_SLOW = ("nvfp4", "fp8_e4m3{2x16}(f32)")


@pytest.mark.compiled_cases("int4{16}(mse,bf16)", "fp4{16}(rceil,e5m3)")
@pytest.mark.parametrize(
    "text",
    [
        *(pytest.param(text, marks=pytest.mark.slow) for text in _SLOW),
        *("nvfp4(nearest_reciprocal)", "int4{16}(mse,bf16)", "fp4{16}(rceil,e5m3)"),
    ],
)
def test_compiled_code_gives_the_same_bits(text, compiler):
    spec = parse(text, axis=1)
    x = torch.randn(6, 40) * torch.logspace(-6, 6, 6).unsqueeze(1)
    t = tensor_scale_mx(x, spec) if spec.scale_format.tensor else None

    def run(x):
        return reference.fake_quantize(x, spec, tensor_scale=t), *reference.quantize(x, spec, tensor_scale=t)

    for got, want in zip(torch.compile(run, fullgraph=True)(x), run(x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("mode", FLOAT_SCALE_MODES)
@pytest.mark.parametrize("text", ["nvfp4", "int4{16}(e4m3_f32_divisor)"])
def test_values_far_below_a_tensor_scale(text, mode):
    """The scale of a tensor of tiny values is the least one: zeros stay zeros, and each value has its own code."""
    spec = parse(text, axis=1, scale_mode=mode)
    x = torch.tensor([[0.0] * 16, [1e-45, -1e-45, 0.0, 1e-44] * 4])
    t = tensor_scale_mx(x, spec)
    assert t.item() in TENSOR_SCALE_RANGE
    fake = reference.fake_quantize(x, spec, tensor_scale=t)
    scale, data = reference.quantize(x, spec, tensor_scale=t)
    assert torch.equal(fake, reference.dequantize(data, scale, spec, torch.float32, 16, tensor_scale=t))
    assert not fake[0].any() and (fake[1] * x[1] >= 0).all()
    for outside in (t / 2 if t < 1 else 2 * t, torch.tensor(0.0), -t):
        assert reference.fake_quantize(x, spec, tensor_scale=outside).isnan().all()


@pytest.mark.parametrize("mode", ["nearest", "nearest_reciprocal"])
def test_values_far_beyond_a_static_tensor_scale_saturate(mode):
    spec, t = parse("nvfp4", axis=0, scale_mode=mode), torch.tensor(1e-36)
    x = torch.tensor([3e38, -3e38, 1e30, 0.0] * 4)  # over the scale of its block Inf, in float32
    largest = 6 * (448 * t)
    for y in (reference.fake_quantize(x, spec, tensor_scale=t), fake_quantize_mx(x, spec, tensor_scale=t)):
        assert torch.equal(y, torch.stack([largest, -largest, largest, 0 * largest] * 4))


@pytest.mark.parametrize("name", [name for name, scale in SCALE_FORMATS.items() if scale.dtype == torch.uint8])
def test_a_scale_is_nan_where_values_are(name):
    """A code of E4M3 with the sign bit is no scale that pt2mx writes, but 0xFF is NaN in the format."""
    scale, codes = SCALE_FORMATS[name], torch.arange(256, dtype=torch.uint8)
    spec = MXSpec("fp4_e2m1", 16, scale_format=name)
    t = torch.ones(()) if scale.tensor else None
    values = dequantize_mx(torch.full((256, 8), 0x22, dtype=torch.uint8), codes[:, None], spec, tensor_scale=t)
    assert torch.equal(spec.scale_format.is_nan(codes), values[:, 0].isnan())
    nan = {0x7F, 0xFF} if scale.grid.name == "fp8_e4m3" else {0xFF}
    assert set(spec.scale_format.is_nan(codes).nonzero().flatten().tolist()) == nan
