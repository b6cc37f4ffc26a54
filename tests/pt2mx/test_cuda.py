"""On an NVIDIA GPU: the operators have the bits of the CPU, eager and compiled, in graphs and streams."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from pt2mx import FORMATS, MXSpec, dequantize_mx, fake_quantize_mx, ops, quantize_mx
from pt2mx.kernels import reference_chunked
from pt2mx.modes import SCALE_MODES, ScaleMode
from tests.compare import same
from tests.operators import through_all_operators
from tests.oracle import modes_of
from tests.random_values import every_pattern, numbers

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("compiler")]


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
        names = [name for name in FORMATS if scale_mode in modes_of(name)]
        fakes = [fake_quantize_mx(x, name, 1, scale_mode=scale_mode) for name in names]
        return *fakes, *quantize_mx(x, names[0], 1, scale_mode=scale_mode)

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
    opcheck(ops.quantize_mx, (x, name, 32, -1, "floor", "even"))
    opcheck(ops.fake_quantize_mx, (x, name, 32, -1, "floor", "even", None, "identity"))
    scale, data = ops.quantize_mx(x, name, 32, -1, "floor", "even")
    opcheck(ops.dequantize_mx, (data, scale, name, 32, torch.bfloat16, -1, 70))
    opcheck(ops.clip_gradient_mx, (torch.randn_like(x), x.detach(), name, 32, -1, "floor", "even"))
    opcheck(ops.random_bits, (torch.tensor(5, device="cuda"), [3, 41]))


def test_one_triton_kernel_and_no_opaque_call():
    def run(x):
        return fake_quantize_mx(torch.nn.functional.gelu(x), "mxfp8") + 1

    _, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), torch.randn(256, 256, device="cuda"))
    called = [line for line in code.splitlines() if "torch.ops.pt2mx" in line and not line.lstrip().startswith("#")]
    assert not called and code.count("@triton.jit") == 1


@pytest.mark.parametrize("ste", ["identity", "clipped"])
def test_gradients_equal_the_cpu(ste):
    x, weight = torch.randn(33, 70) * 4, torch.randn(33, 70)
    gradients = []
    for device in ("cpu", "cuda"):
        leaf = x.clone().to(device).requires_grad_()
        (fake_quantize_mx(leaf, "mxfp4", ste=ste) * weight.to(device)).sum().backward()
        gradients.append(leaf.grad.cpu())
    assert torch.equal(*gradients)


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
