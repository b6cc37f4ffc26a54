"""MXTensor: it has the values of the operators, and works like a tensor."""

import copy

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import pt2mx
from pt2mx import MXError, MXTensor
from tests.float_scale_operators import NAMES
from tests.mx_tensors import mx, parameter_model, same

ELEMENTS = ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8", "int4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.diagonal
@pytest.mark.parametrize("elem", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((3, 100), -1), ((33, 4), 0), ((2, 37, 3), 1), ((5,), 0)])
def test_values_are_the_operators(elem, dtype, shape, axis):
    x = torch.randn(shape, dtype=dtype)
    t = MXTensor.to_mx(x, elem, 16, axis, "rceil", "half_away")
    scale, data = pt2mx.quantize_mx(x, elem, 16, axis, "rceil", "half_away")
    assert torch.equal(t.qdata, data) and torch.equal(t.scale, scale)
    assert (t.shape, t.stride(), t.dtype, t.device) == (x.shape, x.stride(), dtype, x.device)
    assert t.spec == pt2mx.MXSpec(elem, 16, axis % x.dim()) and t.elem_dtype is pt2mx.ELEMENTS[elem]
    expected = pt2mx.fake_quantize_mx(x, elem, 16, axis, "rceil", "half_away")
    assert torch.equal(t.to_dtype(), expected)
    wide = pt2mx.dequantize_mx(data, scale, elem, 16, torch.float32, axis, shape[axis])
    assert torch.equal(t.to_dtype(torch.float32), wide)
    again = MXTensor(data, scale, elem, 16, axis, dtype, shape[axis])
    assert same(again, t) and not t.requires_grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_the_operators_in_every_scale_format(name, dtype):
    x, spec = torch.randn(40, 70, dtype=dtype), pt2mx.parse(name)
    t = pt2mx.tensor_scale_mx(x, name) if spec.scale_format.tensor else None
    scale, data = pt2mx.quantize_mx(x, name, tensor_scale=t)
    tensor = MXTensor.to_mx(x, name)
    assert torch.equal(tensor.qdata, data) and torch.equal(tensor.scale, scale)
    assert (tensor.tensor_scale is t is None) or torch.equal(tensor.tensor_scale, t)
    assert tensor.spec == spec.replace(axis=1, scale_mode=spec.scale_format.scale_mode)
    expected = pt2mx.fake_quantize_mx(x, name)
    assert torch.equal(tensor.to_dtype(), expected)
    assert tensor.statistics()["num_blocks"] == scale.numel()
    y = torch.randn(3, 70, dtype=dtype)
    assert torch.equal(nn.functional.linear(y, tensor), nn.functional.linear(y, expected))
    for other in (tensor.clone(), copy.deepcopy(tensor), tensor.to(torch.float16), tensor.t().contiguous().t()):
        assert torch.equal(other.to_dtype(torch.float32), tensor.to_dtype(torch.float32))
    blocks = spec.element, spec.block_size, -1, dtype, 70, None
    again = MXTensor(data, scale, *blocks, spec.scale_format, spec.block_rows, t)
    assert same(again, tensor)


def test_a_static_tensor_scale():
    x, t = torch.randn(4, 64, requires_grad=True), torch.tensor([0.01])
    tensor = MXTensor.to_mx(x, "nvfp4", tensor_scale=t)
    assert torch.equal(tensor.to_dtype(), pt2mx.fake_quantize_mx(x, "nvfp4", tensor_scale=t))
    tensor.to_dtype().sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 64))
    assert repr(tensor) == (
        "MXTensor(shape=(4, 64), elem_dtype=fp4_e2m1, block_size=16, scale_format=e4m3_f32, axis=1, "
        "dtype=torch.float32, device='cpu')"
    )
    with pytest.raises(MXError, match="has no tensor scale, but tensor_scale was passed"):
        MXTensor.to_mx(x, "mxfp4", tensor_scale=t)
    with pytest.raises(MXError, match="has a tensor scale: pass tensor_scale"):
        MXTensor(tensor.qdata, tensor.scale, "fp4_e2m1", 16, scale_format="e4m3_f32")


def test_formats_of_any_spelling():
    x = torch.randn(4, 64)
    assert MXTensor.to_mx(x, pt2mx.dtypes.float6_e3m2).spec == pt2mx.MXSpec("fp6_e3m2", 32, 1)
    assert MXTensor.to_mx(x, "MXFP4[E2M1]{16}").block_size == 16
    assert MXTensor.to_mx(x, pt2mx.MXSpec("mxfp8", axis=0), block_size=2).spec == pt2mx.MXSpec("mxfp8", 2, 0)
    assert same(*(MXTensor.to_mx(x, "mxfp4", rounding="stochastic", seed=1) for _ in range(2)))
    assert MXTensor.to_mx(x, "mxfp8").__repr__() == (
        "MXTensor(shape=(4, 64), elem_dtype=fp8_e4m3, block_size=32, axis=1, dtype=torch.float32, device='cpu')"
    )
    names = ("float8_e4m3", "float8_e5m2", "float6_e3m2", "float6_e2m3", "float4_e2m1", "int8")
    for name in names:
        assert pt2mx.parse_element(getattr(pt2mx.dtypes, name)) == pt2mx.parse_element(name)


@pytest.mark.parametrize(
    "array",
    [
        np.linspace(-3, 3, 128, dtype=np.float32).reshape(2, 64),
        np.linspace(-3, 3, 128, dtype=np.float16).reshape(2, 64)[:, ::-1],
        np.linspace(-3, 3, 128).reshape(2, 64).astype(ml_dtypes.bfloat16),
        np.linspace(-3, 3, 128, dtype=np.float32).reshape(2, 64).tolist(),
        tuple(map(tuple, np.arange(128).reshape(2, 64).tolist())),
    ],
    ids=["float32", "float16, reversed", "bfloat16", "lists", "tuples of integers"],
)
def test_arrays_and_lists(array):
    want = torch.tensor(array.astype(np.float32).tolist() if isinstance(array, np.ndarray) else array)
    dtype = getattr(torch, array.dtype.name) if isinstance(array, np.ndarray) else torch.float32
    t = MXTensor.to_mx(array, "mxfp4", 16)
    assert same(t, MXTensor.to_mx(want.to(dtype), "mxfp4", 16)) and t.dtype == dtype


def test_a_jax_array():
    import jax.numpy as jnp

    x = np.linspace(-3, 3, 128, dtype=np.float32).reshape(2, 64)
    assert same(MXTensor.to_mx(jnp.asarray(x), "mxfp6"), MXTensor.to_mx(x, "mxfp6"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.ones((2, 32)), r"dtype float64 .* cast it first, for example with x.astype\('float32'\)"),
        (np.ones((2, 32), np.int64), "dtype int64"),
        (np.float32(3), "at least one dimension"),
        (3.0, "a Python float"),
        ("x", "a builtins.str"),
        (None, "a builtins.NoneType"),
        ([[1.0], [1.0, 2.0]], "to_mx: nested lists of equal lengths that hold numbers are an array: expected sequence"),
        (["x"], "to_mx: nested lists"),
        ([], None),
    ],
)
def test_what_is_no_array(data, message):
    if message is None:
        assert MXTensor.to_mx(data, "mxfp8").shape == (0,)
        return
    with pytest.raises(MXError, match=message):
        MXTensor.to_mx(data, "mxfp8")


def test_pinned_memory_as_of_plain_tensors():
    t, x = mx(4, 64), torch.randn(4, 64)
    assert t.is_pinned() is x.is_pinned() is False
    if torch.cuda.is_available():
        return
    for tensor in (x, t):
        with pytest.raises(RuntimeError, match=r"accelerator|NVIDIA driver"):
            tensor.pin_memory()


@pytest.mark.cuda
@pytest.mark.parametrize("elem", ["fp4_e2m1", "fp6_e3m2", "int8"])
def test_pinned_memory_and_copies_that_do_not_wait(elem):
    t = mx(64, 96, elem=elem).t()
    pinned = t.pin_memory()
    assert pinned.is_pinned() and pinned.qdata.is_pinned() and pinned.scale.is_pinned()
    assert same(pinned, t) and pinned.stride() == t.stride() and not t.is_pinned()
    assert pinned.pin_memory() is pinned
    there = pinned.to("cuda", non_blocking=True)
    there.record_stream(torch.cuda.current_stream())
    assert not there.is_pinned() and there.is_cuda
    back = there.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert same(back, t)
    loader = torch.utils.data.DataLoader([t, t], batch_size=None, pin_memory=True)
    assert all(same(item, t) and item.is_pinned() for item in loader)


@pytest.mark.parametrize(
    "copy",
    [
        lambda t: t.to("cpu", non_blocking=True, copy=True),
        lambda t: t.to("cpu", torch.bfloat16, non_blocking=True).to(torch.float32, non_blocking=True),
        lambda t: t.clone().copy_(t, non_blocking=True),
        lambda t: torch.ops.aten._to_copy.default(t, non_blocking=True),
    ],
)
def test_copies_that_do_not_wait(copy):
    t = mx(4, 64, elem="fp6_e2m3")
    assert same(copy(t), t)
    assert t.to("meta", non_blocking=True).device.type == "meta"


def test_shared_memory():
    t = mx(4, 64)
    assert not t.is_shared()
    assert t.share_memory_() is t and t.is_shared() and t.qdata.is_shared() and t.scale.is_shared()


def test_bad_input():
    x = mx(4, 64)
    for call, match in (
        (lambda: mx(4, 64, dtype=torch.float64), "cannot quantize a tensor of dtype torch.float64"),
        (lambda: MXTensor.to_mx(torch.tensor(1.0), "mxfp8"), "at least one dimension"),
        (lambda: MXTensor.to_mx(x, "mxfp8"), "is quantized already"),
        (lambda: mx(4, 64, elem="fp9"), "unknown MX element format"),
        (lambda: mx(4, 64, axis=2), "axis=2 is out of range"),
        (lambda: mx(4, 64, block_size=0), "block_size=0"),
        (
            lambda: MXTensor.to_mx(torch.ones(4), pt2mx.MXSpec("int8", scale_exp_bits=5)),
            "only eager calls of fake_quantize_mx",
        ),
        (lambda: x.to_dtype(torch.float64), "to_dtype: cannot dequantize to torch.float64"),
        (lambda: x.double(), "cannot become torch.float64"),
        (lambda: MXTensor(x.qdata, x.scale[:, :1], "fp8_e4m3"), "scale of shape"),
        (lambda: MXTensor(x.qdata.float(), x.scale, "fp8_e4m3"), "codes and scales are uint8"),
        (lambda: torch.cat([x, mx(4, 64, elem="fp8_e5m2")]), "all tensors must have the format and dtype of"),
        (lambda: torch.cat([x, torch.randn(4, 64)]), "all tensors must have the format and dtype of"),
    ):
        with pytest.raises(MXError, match=match):
            call()


def test_copy_takes_the_same_format_only():
    x, y = mx(4, 64), mx(4, 64)
    assert x.copy_(y) is x and same(x, y)
    others = (torch.randn(4, 64), mx(4, 64, elem="fp8_e5m2"), mx(4, 64, axis=0), mx(2, 64))
    for other in others:
        with pytest.raises(MXError, match="cannot copy"):
            x.copy_(other)
    with pytest.raises(MXError, match=r"cannot copy an MXTensor .* into a plain tensor"):
        torch.empty(4, 64).copy_(x)


def test_to_another_dtype_or_device_keeps_the_codes():
    x = mx(4, 70, elem="fp4_e2m1").t()
    half = x.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(half.qdata, x.qdata) and half.stride() == x.stride()
    assert torch.equal(half.to_dtype(), x.to_dtype().bfloat16())
    meta = x.to("meta", torch.float16)
    assert (meta.device.type, meta.dtype, meta.shape) == ("meta", torch.float16, x.shape)
    assert meta.to_dtype().shape == (70, 4) and x.to("cpu") is x


@pytest.mark.parametrize("elem", ["mxfp4", "nvfp4"])
def test_parameters(elem):
    model, x = parameter_model(elem), torch.randn(5, 70)
    y = model(x)
    assert isinstance(model[0].weight, nn.Parameter) and isinstance(model[0].weight, MXTensor)
    clone = copy.deepcopy(model)
    assert torch.equal(clone(x), y) and clone[0].weight.qdata.data_ptr() != model[0].weight.qdata.data_ptr()
    assert copy.deepcopy(model).to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert copy.deepcopy(model).to("meta")[0].weight.qdata.is_meta
    for assign in (False, True):
        other = parameter_model(elem)
        other.load_state_dict(model.state_dict(), assign=assign)
        assert same(other[0].weight, model[0].weight) and torch.equal(other(x), y)
    plain = nn.Sequential(nn.Linear(70, 8), nn.Linear(8, 3))
    with pytest.raises(RuntimeError, match="load_state_dict takes assign=True"):
        model.load_state_dict(plain.state_dict())


def test_fake_tensors():
    x = mx(4, 70, elem="fp6_e2m3").t()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert isinstance(fake, MXTensor) and fake.shape == (70, 4) and fake.qdata.shape == (54, 4)
        assert fake.to_dtype(torch.bfloat16).stride() == (1, 70)
        made = MXTensor.to_mx(torch.randn(3, 64), "mxfp4") @ torch.randn(64, 2)
        assert made.shape == (3, 2)


@pytest.mark.parametrize("elem", ["mxfp4", "nvfp4"])
@pytest.mark.compiled_cases("mxfp4")
def test_compiled_parameter(elem, compiler):
    model, x = parameter_model(elem), torch.randn(5, 70)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x))


@pytest.mark.compiled
def test_compiled_quantization_with_gradients(compiler):
    def attention(q, k, v):
        scores = MXTensor.to_mx(q, "mxfp8") @ MXTensor.to_mx(k, "mxfp8").transpose(-1, -2)
        return MXTensor.to_mx(scores.softmax(-1), "mxfp6") @ MXTensor.to_mx(v, "mxfp6", axis=-2)

    def gradients(function, length):
        torch.manual_seed(length)
        inputs = [torch.randn(2, n, 32, requires_grad=True) for n in (5, length, length)]
        out = function(*inputs)
        out.pow(2).sum().backward()
        return out, *(x.grad for x in inputs)

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=graphs)
    for length in (10, 45):
        for got, expected in zip(gradients(compiled, length), gradients(attention, length), strict=True):
            torch.testing.assert_close(got, expected)
    assert graphs.frame_count == 1


@pytest.mark.compiled
def test_compiled_quantization_with_a_tensor_scale(compiler):
    def function(x, w):
        return x @ MXTensor.to_mx(w, "nvfp4").t()

    x, w = torch.randn(3, 70), torch.randn(5, 70)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w), function(x, w))


@pytest.mark.compiled
def test_compiled_with_tensors_that_come_and_go(compiler):
    def function(x):
        return x.transpose(0, 1).reshape(-1, 64)[2:10].unsqueeze(0), x.to_dtype() * 2

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (8, 9, 11):
        x = mx(4, rows, 64, elem="fp4_e2m1")
        (view, values), (expected_view, expected) = compiled(x), function(x)
        assert same(view, expected_view) and view.stride() == expected_view.stride()
        assert torch.equal(values, expected)


@pytest.mark.parametrize("elem", ["mxfp4", "nvfp4"])
def test_export(elem):
    model, x = parameter_model(elem), torch.randn(5, 70)
    program = torch.export.export(model, (x,))
    assert "pt2mx.dequantize_mx.default" in {str(node.target) for node in program.graph.nodes}
    assert torch.equal(program.module()(x), model(x))
