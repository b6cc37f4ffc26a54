"""On an NVIDIA GPU: quantization with scales that have a significand equals the definition on the CPU to the bit."""

import random

import pytest
import torch

from pt2mx import FORMATS, SCALE_FORMATS, MXSpec
from pt2mx.kernels import float_scales, reference
from pt2mx.kernels.reference import random_bits
from pt2mx.modes import FLOAT_SCALE_MODES, ROUNDINGS
from tests.compare import same
from tests.kernel_calls import ByArguments, selected
from tests.oracle import NARROW
from tests.random_values import every_code_and_scale, every_pattern, random_values

pytestmark = pytest.mark.cuda

FLOAT_SCALES = [name for name, scale in SCALE_FORMATS.items() if not scale.is_power_of_two]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_kernels(x, spec, seed=0, dtype=torch.float32, factor=1.0):
    """Every kernel, with a multiple of the tensor's own scale."""
    from pt2mx.kernels.gpu import quantize  # of Triton, which is not installed everywhere

    gpu = ByArguments(quantize)
    t = float_scales.tensor_scale(x, spec) * factor if spec.scale_format.tensor else None
    of_gpu = None if t is None else t.cuda()
    drawn = seed_on_gpu = None
    if ROUNDINGS[spec.rounding].random:
        drawn, seed_on_gpu = random_bits(torch.tensor(seed), x.shape), torch.tensor(seed).cuda()
    scale, data = reference.quantize(x, spec, drawn, tensor_scale=t)
    for got, want in zip(gpu.quantize(x.cuda(), spec, seed_on_gpu, of_gpu), (scale, data), strict=True):
        assert same(got, want) and got.dtype == want.dtype and got.is_contiguous()
    got = gpu.fake_quantize(x.cuda(), spec, seed_on_gpu, of_gpu)
    assert same(got, reference.fake_quantize(x, spec, drawn, tensor_scale=t))
    length = x.shape[spec.axis]
    got = gpu.dequantize(data.cuda(), scale.cuda(), spec, dtype, length, of_gpu)
    assert same(got, reference.dequantize(data, scale, spec, dtype, length, tensor_scale=t)) and got.dtype == dtype
    grad = torch.randn(x.shape)
    got = gpu.clip_gradient(grad.cuda(), x.cuda(), spec, of_gpu)
    assert same(got, reference.clip_gradient(grad, x, spec, tensor_scale=t))


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
@pytest.mark.parametrize("scale_mode", FLOAT_SCALE_MODES)
def test_every_mode(scale_mode, scale_format):
    """Ragged blocks along either axis; tensor scales of the tensor itself, and others. NVFP4 with every rounding."""
    first = FLOAT_SCALES.index(scale_format)
    roundings = list(ROUNDINGS) if scale_format == "e4m3_f32" else ["even", list(ROUNDINGS)[1 + first % 7]]
    for i, rounding in enumerate(roundings, first):
        name = ("fp4_e2m1", "fp8_e4m3", "int4", "fp6_e2m3", "int8")[i % 5]
        spec = MXSpec(name, (16, 32, 3)[i % 3], i % 2, scale_mode, rounding, scale_format=scale_format)
        x = torch.cat([random_values((6, 70), DTYPES[i % 3], kind) for kind in range(5)])
        check_kernels(x, spec, i, DTYPES[i // 3 % 3], (1.0, 0.37, 3.0)[i % 3])


@pytest.mark.parametrize("name", NARROW)
def test_every_element(name):
    modes = list(FLOAT_SCALE_MODES)
    for i, rounding in enumerate(("even", "up", "stochastic"), NARROW.index(name)):
        spec = MXSpec(name, 16, i % 2, modes[i % len(modes)], rounding, scale_format="e4m3_f32")
        check_kernels(torch.randn(33, 70).to(DTYPES[i % 3]), spec, i, DTYPES[i % 3])


@pytest.mark.parametrize("scale_format", FLOAT_SCALES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_with_every_scale(name, scale_format):
    from pt2mx.kernels.gpu import quantize

    gpu = ByArguments(quantize)
    *args, length = every_code_and_scale(name, scale_format)
    spec = MXSpec(name, 4096, 1, scale_format=scale_format)
    t = torch.tensor(3.7e-3) if spec.scale_format.tensor else None
    for dtype in DTYPES:
        got = gpu.dequantize(*(a.cuda() for a in args), spec, dtype, length, None if t is None else t.cuda())
        assert same(got, reference.dequantize(*args, spec, dtype, length, tensor_scale=t))


@pytest.mark.parametrize("scale_format", ["e4m3_f32", "e4m3_f32_divisor", "e5m3", "f16"])
@pytest.mark.parametrize("scale_mode", FLOAT_SCALE_MODES)
def test_every_bf16_pattern(scale_mode, scale_format):
    """Every magnitude as the largest of a block, and among others."""
    every = every_pattern(torch.bfloat16).flatten()
    x = torch.cat([every.view(-1, 1).expand(-1, 16) * torch.rand(16).bfloat16(), every.view(-1, 16)])
    check_kernels(x, MXSpec("fp4_e2m1", 16, 1, scale_mode, scale_format=scale_format))


@pytest.mark.parametrize("seed", range(8))
def test_random_specs_and_shapes(seed):
    draw = random.Random(seed)
    for i in range(12):
        shape = [draw.choice((1, 2, 3, 5, 16, 33)) for _ in range(draw.randint(1, 4))]
        axis = draw.randrange(len(shape))
        shape[axis] = draw.choice((1, 7, 16, 32, 70, 128, 500))
        spec = MXSpec(
            draw.choice(NARROW),
            draw.choice((1, 4, 12, 16, 32, 128, 4096)),
            axis,
            draw.choice(list(FLOAT_SCALE_MODES)),
            draw.choice(list(ROUNDINGS)),
            scale_format=draw.choice(FLOAT_SCALES),
        )
        dtype = draw.choice(DTYPES)
        check_kernels(random_values(tuple(shape), dtype, i % 5), spec, i, dtype, draw.choice((1.0, 0.37)))


@pytest.mark.parametrize("t", [0.0, -1.0, float("inf"), float("nan"), 1e-40])
def test_tensor_scales_that_are_no_scale(t):
    from pt2mx.kernels.gpu import quantize

    gpu = ByArguments(quantize)
    x, t = torch.randn(4, 64), torch.tensor(t)
    for scale_format in ("e4m3_f32", "e4m3_f32_divisor"):
        spec = MXSpec("fp4_e2m1", 16, 1, scale_format=scale_format)
        wants = reference.quantize(x, spec, tensor_scale=t)
        for got, want in zip(gpu.quantize(x.cuda(), spec, None, t.cuda()), wants, strict=True):
            assert same(got, want)
        got = gpu.fake_quantize(x.cuda(), spec, None, t.cuda())
        assert same(got, reference.fake_quantize(x, spec, tensor_scale=t))


def test_blocks_that_kernels_do_not_support():
    """Blocks of several rows and very long ones: the definition runs."""
    from pt2mx.kernels.gpu import quantize

    gpu = ByArguments(quantize)
    for spec in (MXSpec("fp8_e4m3", 128, 1, block_rows=128), MXSpec("int4", 8192, 1, scale_format="bf16")):
        x = torch.randn(130, 8200)
        assert gpu.quantize(x.cuda(), spec, None) is None and gpu.fake_quantize(x.cuda(), spec, None) is None
        got = selected.fake_quantize(x.cuda(), spec)
        assert same(got, reference.fake_quantize(x, spec))
