"""On an NVIDIA GPU: every kernel equals the CPU's reference to the bit."""

import pytest
import torch

from pt2mx import ELEMENTS, FORMATS, MXSpec
from pt2mx.kernels import reference, select
from pt2mx.kernels.reference import random_bits
from pt2mx.modes import ROUNDINGS, SCALE_MODES
from tests.compare import same
from tests.kernel_calls import ByArguments, selected
from tests.oracle import NARROW, modes_of
from tests.random_values import every_pattern, numbers

pytestmark = pytest.mark.cuda


def test_triton_takes_plain_tensors():
    assert select._device_of((torch.ones(1, device="cuda"), None)) == "cuda"
    assert select._device_of((torch.ones(1, device="cuda"), torch.ones(1))) is None


def check_kernels(x, spec, dtypes=(torch.bfloat16,)):
    """Every kernel on the device against the reference on the CPU."""
    seed = torch.tensor(1234567890123456789) if ROUNDINGS[spec.rounding].random else None
    random = () if seed is None else (random_bits(seed, x.shape),)
    seed = None if seed is None else seed.cuda()
    scale, data = reference.quantize(x, spec, *random)
    for got, want in zip(selected.quantize(x.cuda(), spec, seed), (scale, data), strict=True):
        assert same(got, want) and got.is_contiguous()
    assert same(selected.fake_quantize(x.cuda(), spec, seed), reference.fake_quantize(x, spec, *random))
    for dtype in dtypes:
        got = selected.dequantize(data.cuda(), scale.cuda(), spec, dtype, x.shape[spec.axis])
        assert same(got, reference.dequantize(data, scale, spec, dtype, x.shape[spec.axis])) and got.dtype == dtype


@pytest.mark.parametrize("scale_mode", [mode for mode in SCALE_MODES if mode != "mse"])
@pytest.mark.parametrize("axis", [0, 1])
def test_pairs_of_every_bf16_pattern(axis, scale_mode):
    """`bf16x2`: every pattern in blocks with others of all sizes, of its own size, and without Inf and NaN."""
    from pt2mx.kernels.gpu import quantize as gpu  # of Triton, which is not installed everywhere

    every = every_pattern(torch.bfloat16).flatten()
    near = every[every.view(torch.int16).bitwise_and(0x7FFF).argsort()]
    mixed = every[torch.randperm(len(every))]
    finite = torch.where(mixed.float().abs() <= 2.0**100, mixed, 0.0)
    small = (torch.randn(1 << 16) * torch.randint(-4, 5, (1 << 16,)).exp2()).bfloat16()
    x = torch.cat([near, mixed, finite, small]).view(-1, 32)
    x = x if axis else x.view(-1, 32, 64).transpose(0, 1).reshape(32, -1)
    floats = [name for name in NARROW if not ELEMENTS[name].is_int and ELEMENTS[name].mantissa_bits <= 5]
    for name in (name for name in floats if scale_mode in modes_of(name)):
        spec = MXSpec(name, 32, axis, scale_mode)
        assert gpu._suits_bf16x2(x.cuda(), spec)
        for got, want in zip(ByArguments(gpu).quantize(x.cuda(), spec), reference.quantize(x, spec), strict=True):
            assert same(got, want)


def test_pairs_of_other_blocks():
    """Ragged, short and long blocks, a tensor that starts in the middle of a word of memory, more than one outer."""
    for shape, axis, block in [
        ((3, 128), 1, 16), ((3, 512), 1, 256), ((2, 8192), 1, 4096), ((4, 20), 1, 32), ((64, 36), 0, 32),
        ((100, 3), 0, 32), ((2, 44, 5, 7), 1, 12), ((12, 9), 0, 4096), ((5, 64, 1), 1, 32), ((0, 64), 1, 32),
        ((64, 80), 0, 4),
    ]:  # fmt: skip
        check_kernels(numbers(*shape, dtype=torch.bfloat16), MXSpec("fp6_e3m2", block, axis))
        check_kernels(numbers(*shape, dtype=torch.bfloat16), MXSpec("fp4_e2m1", block, axis))
        check_kernels(numbers(*shape, dtype=torch.bfloat16), MXSpec("fp8_e5m2", block, axis))
    x = numbers(65 * 64, dtype=torch.bfloat16).cuda()[1 : 1 + 64 * 64].view(64, 64)
    assert x.is_contiguous() and x.data_ptr() % 4
    spec = MXSpec("fp4_e2m1", 32, 1)
    results = selected.quantize(x, spec, None)
    for got, want in zip(results, reference.quantize(x.cpu(), spec), strict=True):
        assert same(got, want)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("scale_mode", SCALE_MODES)
def test_every_bf16_pattern_mode_and_rounding(scale_mode, rounding):
    x = every_pattern(torch.bfloat16)
    seed = torch.tensor(7) if rounding == "stochastic" else None
    random = None if seed is None else random_bits(seed, x.shape)
    for name in (name for name in FORMATS if scale_mode in modes_of(name)):
        spec = MXSpec(name, 1, 1, scale_mode, rounding)
        got = selected.fake_quantize(x.cuda(), spec, None if seed is None else seed.cuda())
        assert same(got, reference.fake_quantize(x, spec, random))


@pytest.mark.parametrize(
    ("name", "scale_mode", "rounding"),
    [
        (name, *modes)
        for name in ("fp6_e3m2", "fp4_e2m1", "int8")
        for modes in (*((mode, "even") for mode in modes_of(name)), *(("floor", r) for r in ROUNDINGS))
    ],
)
def test_codes_of_every_mode_and_rounding(name, scale_mode, rounding):
    x = numbers(48, 96, dtype=torch.bfloat16)
    spec = MXSpec(name, 32, 1, scale_mode, rounding)
    seed = torch.tensor(3)
    random = (random_bits(seed, x.shape),) if rounding == "stochastic" else ()
    got = selected.quantize(x.cuda(), spec, seed.cuda() if random else None)
    for a, b in zip(got, reference.quantize(x, spec, *random), strict=True):
        assert same(a, b)


@pytest.mark.parametrize("name", NARROW)
def test_every_element(name):
    check_kernels(numbers(40, 70), MXSpec(name, 16, 1, "even"), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("shape", "axis", "block"),
    [
        ((64, 512), 1, 32),
        ((512, 64), 0, 32),
        ((70,), 0, 32),
        ((3, 70, 5), 1, 32),
        ((2, 40, 14, 14), 1, 32),
        ((2, 48, 3, 128), 1, 16),
        ((5, 130), 1, 3),
        ((130, 20), 0, 5),
        ((3, 1000), 1, 48),
        ((1000, 3), 0, 1000),
        ((7, 33), 1, 1),
        ((4, 33), 1, 4096),
        ((4, 5000), 1, 5000),
        ((1, 1), 0, 32),
        ((0, 64), 1, 32),
        ((64, 0), 0, 32),
        ((4, 0), 1, 32),
    ],
)
@pytest.mark.parametrize(
    ("name", "scale_mode", "rounding"),
    [("fp6_e2m3", "mse", "up"), ("fp4_e2m1", "rceil", "stochastic")],
)
def test_shapes_axes_and_blocks(shape, axis, block, name, scale_mode, rounding):
    check_kernels(numbers(*shape), MXSpec(name, block, axis, scale_mode, rounding))


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp6_e3m2", "fp4_e2m1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(name, dtype):
    check_kernels(numbers(33, 96, dtype=dtype), MXSpec(name, 32, 1), (torch.float32, torch.float16, torch.bfloat16))


def test_strides():
    x = numbers(64, 96, 3)
    for view in (x.transpose(0, 1), x[::2, :, 1], x[:, 5:80], x.expand(2, 64, 96, 3), x.permute(2, 0, 1)[:, 1:]):
        for axis in range(view.dim()):
            check_kernels(view, MXSpec("fp6_e3m2", 32, axis))


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_every_byte_and_scale(name):
    spec = MXSpec(name, 4096, 1)
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 3)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    length = 768 * 8 // spec.element.bits
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = selected.dequantize(data.cuda(), scale.cuda(), spec, dtype, length)
        assert same(got, reference.dequantize(data, scale, spec, dtype, length))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["fp8_e5m2", "int4_full"])
def test_clip_gradient(name, axis):
    x, grad = numbers(64, 70), torch.randn(64, 70)
    for scale_mode in modes_of(name):
        spec = MXSpec(name, 32, axis, scale_mode)
        got = selected.clip_gradient(grad.cuda(), x.cuda(), spec)
        assert same(got, reference.clip_gradient(grad, x, spec))


def test_random_bits():
    for shape in [(1,), (5,), (3, 4099)]:
        seed = torch.tensor(2**62 + 12345)
        assert same(selected.random_bits(seed.cuda(), shape), random_bits(seed, shape))
