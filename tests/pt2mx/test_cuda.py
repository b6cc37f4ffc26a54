"""On an NVIDIA GPU: every kernel equals the CPU's reference to the bit, eager and compiled."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from pt2mx import ELEMENTS, FORMATS, MXSpec, dequantize_mx, fake_quantize_mx, ops, quantize_mx
from pt2mx.kernels import reference, reference_chunked, select
from pt2mx.kernels.philox import random_bits
from pt2mx.modes import ROUNDINGS, SCALE_MODES, ScaleMode
from tests.oracle import NARROW
from tests.pt2mx.ops.test_inductor import through_all_operators

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("compiler")]


def same(got, want):
    got = got.cpu()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return got.shape == want.shape and bool(((got.view(integer) == want.view(integer)) | (want != want)).all())


def every_pattern(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).unsqueeze(1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_operators_equal_the_cpu(name, compiled):
    run = torch.compile(through_all_operators, fullgraph=True, dynamic=False) if compiled else through_all_operators
    for shape, axis in [((4, 64), -1), ((3, 70), -1), ((3, 70, 5), 1), ((2, 40, 6, 6), 1)]:
        x = torch.randn(shape)
        for got, want in zip(run(x.cuda(), name, axis), through_all_operators(x, name, axis), strict=True):
            assert same(got, want)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("scale_mode", SCALE_MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(dtype, scale_mode, compiled):
    def run(x):
        fakes = [fake_quantize_mx(x, name, 1, scale_mode=scale_mode) for name in FORMATS]
        return *fakes, *quantize_mx(x, "fp8_e4m3", 1, scale_mode=scale_mode)

    x = every_pattern(dtype)
    function = torch.compile(run, fullgraph=True) if compiled else run
    for got, want in zip(function(x.cuda()), run(x), strict=True):
        assert same(got, want)


@pytest.mark.parametrize("offsets", [(-1, 0, 2, -3, 1), (1,)])
def test_a_scale_mode_with_other_offsets(monkeypatch, offsets):
    mode = f"one of {offsets}"
    monkeypatch.setitem(SCALE_MODES, mode, ScaleMode(SCALE_MODES["floor"].threshold, offsets))
    x = torch.randn(40, 64)
    for name in FORMATS:
        want = quantize_mx(x, name, scale_mode=mode)
        for got, expected in zip(quantize_mx(x.cuda(), name, scale_mode=mode), want, strict=True):
            assert same(got, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_code_and_scale(compiled):
    data = torch.arange(256, dtype=torch.uint8).expand(256, -1).contiguous()
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1)

    def run(data, scale):
        return tuple(dequantize_mx(data, scale, name, 256) for name in ("fp8_e4m3", "fp8_e5m2", "int8"))

    function = torch.compile(run, fullgraph=True) if compiled else run
    for got, want in zip(function(data.cuda(), scale.cuda()), run(data, scale), strict=True):
        assert same(got, want)


@pytest.mark.parametrize("name", FORMATS)
def test_opcheck(name):
    x = torch.randn(4, 70, device="cuda", requires_grad=True)
    opcheck(ops.quantize_mx, (x, name, 32))
    opcheck(ops.fake_quantize_mx, (x, name, 32))
    scale, data = ops.quantize_mx(x, name, 32)
    opcheck(ops.dequantize_mx, (data, scale, name, 32, torch.bfloat16, -1, 70))
    opcheck(ops.clip_gradient_mx, (torch.randn_like(x), x.detach(), name, 32))
    opcheck(ops.random_bits, (torch.tensor(5, device="cuda"), [3, 41]))


def test_one_triton_kernel_and_no_opaque_call():
    def run(x):
        return fake_quantize_mx(torch.nn.functional.gelu(x), "mxfp8") + 1

    _, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), torch.randn(256, 256, device="cuda"))
    called = [line for line in code.splitlines() if "torch.ops.pt2mx" in line and not line.lstrip().startswith("#")]
    assert not called and code.count("@triton.jit") == 1


def test_triton_serves_plain_tensors():
    assert select.kernels_for(torch.ones(1, device="cuda")).__name__ == "pt2mx.kernels.gpu.quantize"


def numbers(*shape, dtype=torch.float32):
    """Normal numbers of several binades, zeros, subnormals, and a block that is not finite where there is room."""
    x = torch.randn(shape) * torch.randint(-3, 4, shape).exp2()
    special = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-140), 2.0**-126, 6.0, -0.25, 1.75])
    some = torch.randperm(x.numel())[: len(special)]
    x.view(-1)[some] = special[: len(some)]
    if x.numel() > 1000:
        x.view(-1)[torch.randint(x.numel(), (3,))] = torch.tensor([float("inf"), -float("inf"), float("nan")])
        x.view(-1)[:70] *= 2.0**-120
    return x.to(dtype)


def check_kernels(x, spec, dtypes=(torch.bfloat16,)):
    """Every kernel on the device against the reference on the CPU."""
    kernels = select.kernels_for(x.cuda())
    seed = torch.tensor(1234567890123456789) if ROUNDINGS[spec.rounding].random else None
    random = () if seed is None else (random_bits(seed, x.shape),)
    seed = None if seed is None else seed.cuda()
    scale, data = reference.quantize(x, spec, *random)
    for got, want in zip(kernels.quantize(x.cuda(), spec, seed), (scale, data), strict=True):
        assert same(got, want) and got.is_contiguous()
    assert same(kernels.fake_quantize(x.cuda(), spec, seed), reference.fake_quantize(x, spec, *random))
    for dtype in dtypes:
        got = kernels.dequantize(data.cuda(), scale.cuda(), spec, dtype, x.shape[spec.axis])
        assert same(got, reference.dequantize(data, scale, spec, dtype, x.shape[spec.axis])) and got.dtype == dtype
    return kernels


@pytest.mark.parametrize("scale_mode", [mode for mode in SCALE_MODES if mode != "mse"])
@pytest.mark.parametrize("axis", [0, 1])
def test_pairs_of_every_bf16_pattern(axis, scale_mode):
    """`bf16x2`: every pattern in blocks with others of all sizes, of its own size, and without Inf and NaN."""
    from pt2mx.kernels.gpu import quantize as gpu

    every = every_pattern(torch.bfloat16).flatten()
    near = every[every.view(torch.int16).bitwise_and(0x7FFF).argsort()]
    mixed = every[torch.randperm(len(every))]
    finite = torch.where(mixed.float().abs() <= 2.0**100, mixed, 0.0)
    small = (torch.randn(1 << 16) * torch.randint(-4, 5, (1 << 16,)).exp2()).bfloat16()
    x = torch.cat([near, mixed, finite, small]).view(-1, 32)
    x = x if axis else x.view(-1, 32, 64).transpose(0, 1).reshape(32, -1)
    floats = [name for name in NARROW if not ELEMENTS[name].is_int and ELEMENTS[name].mantissa_bits <= 5]
    for name in floats:
        spec = MXSpec(name, 32, axis, scale_mode)
        assert gpu._suits_bf16x2(x.cuda(), spec)
        for got, want in zip(gpu.quantize(x.cuda(), spec, None), reference.quantize(x, spec), strict=True):
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
    for got, want in zip(select.kernels_for(x).quantize(x, spec, None), reference.quantize(x.cpu(), spec), strict=True):
        assert same(got, want)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("scale_mode", SCALE_MODES)
def test_every_bf16_pattern_mode_and_rounding(scale_mode, rounding):
    x = every_pattern(torch.bfloat16)
    kernels = select.kernels_for(x.cuda())
    seed = torch.tensor(7) if rounding == "stochastic" else None
    random = None if seed is None else random_bits(seed, x.shape)
    for name in FORMATS:
        spec = MXSpec(name, 1, 1, scale_mode, rounding)
        got = kernels.fake_quantize(x.cuda(), spec, None if seed is None else seed.cuda())
        assert same(got, reference.fake_quantize(x, spec, random))


@pytest.mark.parametrize("name", ["fp6_e3m2", "int8"])
@pytest.mark.parametrize(
    ("scale_mode", "rounding"), [*((mode, "even") for mode in SCALE_MODES), *(("floor", r) for r in ROUNDINGS)]
)
def test_codes_of_every_mode_and_rounding(name, scale_mode, rounding):
    x = numbers(48, 96, dtype=torch.bfloat16)
    spec = MXSpec(name, 32, 1, scale_mode, rounding)
    kernels, seed = select.kernels_for(x.cuda()), torch.tensor(3)
    random = (random_bits(seed, x.shape),) if rounding == "stochastic" else ()
    got = kernels.quantize(x.cuda(), spec, seed.cuda() if random else None)
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
    kernels, spec = select.kernels_for(torch.ones(1, device="cuda")), MXSpec(name, 4096, 1)
    data = torch.arange(256, dtype=torch.uint8).repeat(256, 3)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    length = 768 * 8 // spec.element.bits
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = kernels.dequantize(data.cuda(), scale.cuda(), spec, dtype, length)
        assert same(got, reference.dequantize(data, scale, spec, dtype, length))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["fp8_e5m2", "int4_full"])
def test_clip_gradient(name, axis):
    x, grad = numbers(64, 70), torch.randn(64, 70)
    for scale_mode in SCALE_MODES:
        spec = MXSpec(name, 32, axis, scale_mode)
        got = select.kernels_for(x.cuda()).clip_gradient(grad.cuda(), x.cuda(), spec)
        assert same(got, reference.clip_gradient(grad, x, spec))


@pytest.mark.parametrize("ste", ["identity", "clipped"])
def test_gradients_equal_the_cpu(ste):
    x, weight = torch.randn(33, 70) * 4, torch.randn(33, 70)
    gradients = []
    for device in ("cpu", "cuda"):
        leaf = x.clone().to(device).requires_grad_()
        (fake_quantize_mx(leaf, "mxfp4", ste=ste) * weight.to(device)).sum().backward()
        gradients.append(leaf.grad.cpu())
    assert torch.equal(*gradients)


def test_random_bits():
    for shape in [(1,), (5,), (3, 4099)]:
        seed = torch.tensor(2**62 + 12345)
        assert same(select.kernels_for(seed.cuda()).random_bits(seed.cuda(), shape), random_bits(seed, shape))


@pytest.mark.parametrize("axis", [0, 1])
def test_more_than_two_to_the_31_elements(axis):
    """The offset of a value within its block does not fit 32 bits either, where blocks run along dimension 0."""
    shape = [(17, (1 << 27) + 32), ((1 << 26) + 32, 33)][axis]
    x = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16).repeat(2200)[: shape[0] * shape[1]].view(shape)

    def last(y):
        return y.narrow(1 - axis, y.shape[1 - axis] - 64, 64)

    for name in ("mxfp4", "mxfp6"):
        assert torch.equal(last(fake_quantize_mx(x, name, axis=axis)), fake_quantize_mx(last(x), name, axis=axis))
        scale, data = quantize_mx(x, name, axis=axis)
        for got, want in zip((scale, data), quantize_mx(last(x), name, axis=axis), strict=True):
            assert torch.equal(last(got), want)
        values = dequantize_mx(data, scale, name, axis=axis, target_dtype=x.dtype, length=shape[axis])
        assert torch.equal(last(values), fake_quantize_mx(last(x), name, axis=axis))


def test_largest_blocks_go_to_the_sliced_reference():
    x = numbers(2, 10000)
    spec = MXSpec("fp8_e4m3", 10000, 1)
    assert same(fake_quantize_mx(x.cuda(), spec), reference_chunked.fake_quantize(x, spec, None))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device():
    x = torch.randn(64, 96, device="cuda", requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fake_quantize_mx(x, "mxfp4", rounding="stochastic", ste="clipped").sum().backward()
        scale, data = quantize_mx(x, "mxfp6", rounding="stochastic", seed=3)
        dequantize_mx(data, scale, "mxfp6")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(function):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph, outputs


@pytest.mark.parametrize("name", FORMATS)
def test_cuda_graph(name):
    x = torch.randn(64, 96, device="cuda")

    def run():
        scale, data = quantize_mx(x, name)
        return fake_quantize_mx(x, name), scale, data, dequantize_mx(data, scale, name)

    graph, outputs = captured(run)
    for _ in range(2):
        x.copy_(torch.randn(64, 96))
        graph.replay()
        for got, want in zip(outputs, run(), strict=True):
            assert torch.equal(got, want)


def test_each_replay_of_a_cuda_graph_draws_anew():
    x = torch.rand(64, 96, device="cuda")
    graph, output = captured(lambda: fake_quantize_mx(x, "mxfp4", rounding="stochastic"))
    graph.replay()
    first = output.clone()
    graph.replay()
    assert not torch.equal(first, output)


def test_streams_run_side_by_side():
    inputs = [torch.randn(512, 512) for _ in range(4)]
    streams, outputs = [torch.cuda.Stream() for _ in inputs], []
    for x, stream in zip(inputs, streams, strict=True):
        with torch.cuda.stream(stream):
            outputs.append(fake_quantize_mx(x.cuda(), "mxfp6"))
    torch.cuda.synchronize()
    for x, got in zip(inputs, outputs, strict=True):
        assert same(got, fake_quantize_mx(x, "mxfp6"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    x = torch.randn(64, 96)
    assert same(fake_quantize_mx(x.to("cuda:1"), "mxfp4"), fake_quantize_mx(x, "mxfp4"))


@pytest.mark.parametrize("rounding", ["half_away", "stochastic"])
@pytest.mark.parametrize("scale_mode", ["floor", "mse"])
def test_compiled_equals_eager(scale_mode, rounding):
    def run(x):
        fake = fake_quantize_mx(x, "mxfp4", scale_mode=scale_mode, rounding=rounding, seed=5)
        return fake, *quantize_mx(x, "mxfp6", scale_mode=scale_mode, rounding=rounding, seed=5)

    x = numbers(48, 96).cuda()
    for got, want in zip(torch.compile(run, fullgraph=True)(x), run(x), strict=True):
        assert same(got, want.cpu())
