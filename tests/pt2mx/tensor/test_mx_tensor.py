"""MXTensor: its values are those of the operators, it moves whole blocks, and it goes where tensors go."""

import copy
import io
import pickle

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import pt2mx
from pt2mx import MXError, MXTensor
from pt2mx.tensor.state import flatten_state, unflatten_state

ELEMENTS = ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8", "int4"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PRODUCTS = {
    "linear": (F.linear, (5, 64), (7, 64)),
    "linear, three dimensions": (F.linear, (2, 5, 64), (7, 64)),
    "mm": (torch.mm, (5, 64), (64, 7)),
    "bmm": (torch.bmm, (3, 5, 64), (3, 64, 7)),
    "mv": (torch.mv, (5, 64), (64,)),
    "dot": (torch.dot, (64,), (64,)),
    "matmul, heads": (torch.matmul, (2, 3, 5, 64), (2, 3, 64, 7)),
    "matmul, broadcast": (torch.matmul, (2, 1, 5, 64), (3, 64, 7)),
    "matmul, folded": (torch.matmul, (2, 5, 64), (64, 7)),
    "operator": (lambda x, y: x @ y, (5, 64), (64, 7)),
}


def mx(*shape: int, elem: str = "fp8_e4m3", dtype=torch.float32, **fields) -> MXTensor:
    return MXTensor.to_mx(torch.randn(shape, dtype=dtype), elem, **fields)


def same(a: MXTensor, b: MXTensor) -> bool:
    parts = [torch.equal(getattr(a, part), getattr(b, part)) for part in ("qdata", "scale")]
    return all(parts) and (a.spec, a.shape, a.dtype) == (b.spec, b.shape, b.dtype)


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
        with pytest.raises(RuntimeError, match="accelerator"):
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


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_products_equal_those_of_the_values(product, dtype, inference):
    function, left, right = PRODUCTS[product]
    x = mx(*left, dtype=dtype)
    y = mx(*right, elem="fp4_e2m1", dtype=dtype, axis=-1 if len(right) == 1 or function is F.linear else -2)
    with torch.inference_mode(inference):
        for a, b in ((x, y), (x, y.to_dtype()), (x.to_dtype(), y)):
            out = function(a, b)
            assert type(out) is torch.Tensor
            assert torch.equal(out, function(x.to_dtype(), y.to_dtype()))


@pytest.mark.parametrize("name", ["mm", "matmul", "addmm", "linear"])
@pytest.mark.parametrize("inference", [False, True])
def test_aten_products(name, inference):
    x, w, bias = mx(5, 64), mx(7, 64, elem="fp6_e2m3"), torch.randn(7)
    with torch.inference_mode(inference):
        operator = getattr(torch.ops.aten, name)
        args = {"addmm": (bias, x, w.t()), "linear": (x, w, bias)}.get(name, (x, w.t()))
        plain = [t.to_dtype() if isinstance(t, MXTensor) else t for t in args]
        assert torch.equal(operator(*args), operator(*plain))


def test_other_products_by_function():
    bias, x, y = torch.randn(3, 5, 7), mx(3, 5, 64), mx(3, 64, 7, axis=1)
    assert torch.equal(torch.baddbmm(bias, x, y), torch.baddbmm(bias, x.to_dtype(), y.to_dtype()))
    assert torch.equal(torch.addmm(bias[0], x[0], y[0]), torch.addmm(bias[0], x[0].to_dtype(), y[0].to_dtype()))
    w = mx(7, 64, elem="fp4_e2m1")
    plain = w.to_dtype()
    for out, expected in (
        (torch.randn(5, 64, generator=torch.manual_seed(1)) @ w.t(), None),
        (F.linear(x, w, bias[0, 0]), F.linear(x.to_dtype(), plain, bias[0, 0])),
        (x.matmul(w.mT), x.to_dtype().matmul(plain.mT)),
    ):
        expected = torch.randn(5, 64, generator=torch.manual_seed(1)) @ plain.t() if expected is None else expected
        assert torch.equal(out, expected)


def test_attention_product_in_four_dimensions():
    q, k = torch.randn(2, 4, 9, 32, dtype=torch.bfloat16), torch.randn(2, 4, 11, 32, dtype=torch.bfloat16)
    q_mx, k_mx = MXTensor.to_mx(q, "mxfp8"), MXTensor.to_mx(k, "mxfp6")
    expected = pt2mx.fake_quantize_mx(q, "mxfp8") @ pt2mx.fake_quantize_mx(k, "mxfp6").transpose(2, 3)
    assert torch.equal(torch.matmul(q_mx, k_mx.transpose(2, 3)), expected)


def test_autocast():
    x, w = mx(5, 64), mx(7, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, w).dtype == torch.bfloat16
        assert torch.equal(F.linear(x, w), F.linear(x.to_dtype(), w.to_dtype()))
        assert torch.equal(torch.ops.aten.mm(x, w.t()), torch.mm(x.to_dtype(), w.to_dtype().t()))


@pytest.mark.parametrize("through", ["function", "aten", "views"])
def test_gradients_pass_straight_through(through):
    def run(quantize):
        torch.manual_seed(0)
        x, w = (torch.randn(shape, requires_grad=True) for shape in ((2, 6, 64), (8, 64)))
        a, b = quantize(x, "mxfp8"), quantize(w, "mxfp4")
        if through == "function":
            y = F.linear(a, b)
        elif through == "aten":
            y = torch.ops.aten.matmul(a, b.t())
        else:
            y = a.transpose(0, 1).reshape(12, 64)[2:].unsqueeze(0).expand(3, 10, 64) @ b.t()
        y.pow(2).sum().backward()
        return y, x.grad, w.grad

    for got, expected in zip(run(MXTensor.to_mx), run(pt2mx.fake_quantize_mx), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5)


def test_gradient_of_a_cast():
    x = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    t = MXTensor.to_mx(x, "mxfp8")
    assert t.requires_grad and not t.detach().requires_grad
    gradient = torch.randn(4, 64)
    t.to_dtype(torch.float32).backward(gradient)
    assert torch.equal(x.grad, gradient.bfloat16())


# of a tensor (4, 6, 128) in blocks of 32 along the last dimension
VIEWS = {
    "transpose": lambda x: x.transpose(1, 2),
    "transpose back": lambda x: x.transpose(-1, 0).transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "mT": lambda x: x.mT,
    "t": lambda x: x[0].t(),
    "movedim": lambda x: x.movedim(0, 1).contiguous(),
    "contiguous": lambda x: x.transpose(0, 2).contiguous(),
    "clone": lambda x: x.transpose(0, 2).clone(),
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-1).unsqueeze(2),
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze dim": lambda x: x[:, :1].squeeze(1),
    "squeeze dims": lambda x: x[:1, :1].squeeze((0, 1)),
    "squeeze nothing": lambda x: x.squeeze(2),
    "expand": lambda x: x[:, None].expand(2, 4, 3, -1, 128),
    "repeated heads": lambda x: x[:, None].expand(4, 3, 6, 128).reshape(12, 6, 128),
    "flatten": lambda x: x.flatten(0, 1),
    "unflatten": lambda x: x.unflatten(1, (2, -1)),
    "view": lambda x: x.view(2, 1, 12, 128, 1),
    "view of the transposed": lambda x: x.transpose(1, 2).view(2, 2, 128, 6),
    "reshape of the transposed": lambda x: x.permute(1, 0, 2).reshape(24, 128),
    "join whole blocks": lambda x: x.reshape(-1),
    "divide into whole blocks": lambda x: x.view(4, 6, 2, 64),
    "select": lambda x: x[1, -1],
    "slice": lambda x: x[1:4:2, -3:],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "slice blocks": lambda x: x[..., 32:96],
    "slice the last blocks": lambda x: x[..., -64:],
    "slice blocks of the transposed": lambda x: x.transpose(0, 2)[64:, 2:],
    "empty slice": lambda x: x[2:2],
    "split": lambda x: x.split(3)[1],
    "split with sizes": lambda x: x.split([1, 5], dim=1)[1],
    "split blocks": lambda x: x.split(64, -1)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "unbind": lambda x: x.unbind(1)[2],
    "cat": lambda x: torch.cat([x, x[1:]]),
    "cat blocks": lambda x: torch.cat([x, x[..., :32]], dim=-1),
    "detach": lambda x: x.detach(),
    "alias": lambda x: torch.ops.aten.alias(x),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("elem", ["fp8_e4m3", "fp6_e2m3", "fp4_e2m1"])
@pytest.mark.parametrize("inference", [False, True])
def test_views_move_whole_blocks(view, elem, inference):
    x = mx(4, 6, 128, elem=elem)
    with torch.inference_mode(inference):
        result, expected = VIEWS[view](x), VIEWS[view](x.to_dtype())
        assert isinstance(result, MXTensor) and result.elem_dtype == x.elem_dtype
        assert result.shape == expected.shape and result.stride() == expected.stride()
        assert torch.equal(result.to_dtype(), expected)
        assert torch.equal(result.contiguous().to_dtype(), expected)
        axis = torch.tensor(result.shape).prod() // result.shape[result.axis]  # lines along the block axis
        assert result.scale.numel() == axis * -(-result.shape[result.axis] // 32)


def test_a_view_shares_memory():
    x = mx(4, 64)
    view = x.t()[:, 1]
    assert view.qdata.data_ptr() == x.qdata[1].data_ptr()
    assert x.transpose(0, 1).to_dtype().stride() == (1, 64)


@pytest.mark.parametrize(("elem", "length", "end"), [("fp4_e2m1", 101, 96), ("fp6_e2m3", 70, 64), ("int8", 50, 32)])
def test_views_of_ragged_blocks(elem, length, end):
    x = mx(3, 4, length, elem=elem)
    values = x.to_dtype()
    for view in (
        lambda x: x.flatten(0, 1),
        lambda x: x.transpose(0, 2)[:, 1],
        lambda x: x[..., end:],
        lambda x: x[..., :end],
    ):
        assert torch.equal(view(x).to_dtype(), view(values))
    assert torch.equal(torch.cat([x[..., :end], x[..., end:]], -1).to_dtype(), values)
    with pytest.raises(MXError, match="would split a block"):
        x.reshape(-1)
    with pytest.raises(MXError, match="joining others to it along dimension 2 would split a block"):
        torch.cat([x, x], -1)


SPLITS = {
    "slice.Tensor": lambda x: x[..., :33],
    "slice.Tensor: the slice 0:128:2": lambda x: x[..., ::2],
    "select.int": lambda x: x[..., 5],
    "split": lambda x: x.split(16, -1),
    "unbind.int": lambda x: x.unbind(-1),
    "view.default: a view as (4, 6, 8, 16)": lambda x: x.view(4, 6, 8, 16),
    "view": lambda x: x.transpose(1, 2).flatten(1, 2),
    "squeeze": lambda x: mx(4, 6, 1).squeeze(),
    "expand": lambda x: mx(4, 6, 1).expand(4, 6, 128),
}


@pytest.mark.parametrize("what", SPLITS)
def test_splitting_a_block_is_an_error(what):
    with pytest.raises(MXError) as error:
        SPLITS[what](mx(4, 6, 128, elem="fp6_e3m2"))
    message = str(error.value)
    assert message.startswith("aten.") and what in message and "would split a block of an MXTensor of shape" in message
    assert "in blocks of 32 along dimension" in message and message.endswith("dequantize it first, with .to_dtype()")


def test_slices_must_end_with_a_byte():
    x = mx(4, 6, elem="fp4_e2m1", block_size=3)
    with pytest.raises(MXError, match="would split a block"):
        x[:, :3]
    y = mx(4, 12, elem="fp4_e2m1", block_size=3)
    assert torch.equal(y[:, 6:].to_dtype(), y.to_dtype()[:, 6:])


UNDEFINED = {
    "aten.add.Tensor": lambda x: x + 1,
    "aten.relu.default": F.relu,
    "aten.add_.Tensor": lambda x: x.add_(1),
    "aten.sum.default": lambda x: x.sum(),
    "aten.equal.default": lambda x: torch.equal(x, x),
    "aten.index.Tensor": lambda x: x[[0, 1]],
    "aten.native_layer_norm.default": lambda x: F.layer_norm(x, (64,)),
    "aten.stack.default": lambda x: torch.stack([x, x]),
    "aten.zeros_like.default": torch.zeros_like,
}


@pytest.mark.parametrize("operator", UNDEFINED)
def test_undefined_operators_say_so(operator):
    message = (
        rf"{operator} is not defined for an MXTensor of shape \(4, 64\) \(fp4_e2m1 in blocks of 32 along dimension 1\)"
        r": dequantize it first, with .to_dtype\(\)"
    )
    with pytest.raises(MXError, match=message):
        UNDEFINED[operator](mx(4, 64, elem="fp4_e2m1"))


def test_bad_input():
    x = mx(4, 64)
    for call, match in (
        (lambda: mx(4, 64, dtype=torch.float64), "cannot quantize a tensor of dtype torch.float64"),
        (lambda: MXTensor.to_mx(torch.tensor(1.0), "mxfp8"), "at least one dimension"),
        (lambda: MXTensor.to_mx(x, "mxfp8"), "is quantized already"),
        (lambda: mx(4, 64, elem="fp9"), "unknown MX element format"),
        (lambda: mx(4, 64, axis=2), "axis=2 is out of range"),
        (lambda: mx(4, 64, block_size=0), "block_size=0"),
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


def parameter_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(70, 8), nn.Linear(8, 3))
    model[0].weight = nn.Parameter(MXTensor.to_mx(model[0].weight.detach(), "mxfp4"), requires_grad=False)
    return model


def test_parameters():
    model, x = parameter_model(), torch.randn(5, 70)
    y = model(x)
    assert isinstance(model[0].weight, nn.Parameter) and isinstance(model[0].weight, MXTensor)
    clone = copy.deepcopy(model)
    assert torch.equal(clone(x), y) and clone[0].weight.qdata.data_ptr() != model[0].weight.qdata.data_ptr()
    assert copy.deepcopy(model).to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    assert copy.deepcopy(model).to("meta")[0].weight.qdata.is_meta
    for assign in (False, True):
        other = parameter_model()
        other.load_state_dict(model.state_dict(), assign=assign)
        assert same(other[0].weight, model[0].weight) and torch.equal(other(x), y)
    plain = nn.Sequential(nn.Linear(70, 8), nn.Linear(8, 3))
    with pytest.raises(RuntimeError, match="load_state_dict takes assign=True"):
        model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("elem", ["fp8_e4m3", "fp6_e2m3", "fp4_e2m1"])
def test_persistence(elem):
    x = mx(3, 5, 37, elem=elem, dtype=torch.bfloat16).transpose(0, 1)
    for result in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), saved(x, weights_only=True)):
        assert same(result, x) and result.stride() == x.stride() and torch.equal(result.to_dtype(), x.to_dtype())


def test_a_file_that_names_the_type_by_its_older_place(monkeypatch):
    x = mx(3, 37, elem="fp4_e2m1")
    monkeypatch.setattr(MXTensor, "__module__", "pt2mx.tensor")
    assert same(saved(x, weights_only=True), x)


def saved(value: object, **options) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), **options)


def test_a_checkpoint_loads_in_another_process(tmp_path, run_python):
    model = parameter_model()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    code = f"""
import sys, torch, pt2mx
assert "transformers" not in sys.modules
state = torch.load({str(tmp_path / "model.pt")!r}, weights_only=True)
print(state["0.weight"], state["0.weight"].to_dtype().double().sum().item())
"""
    weight = model[0].weight
    assert run_python(code).strip() == f"{weight.data!r} {weight.to_dtype().double().sum().item()}"


def test_safetensors(tmp_path):
    state = {**parameter_model().state_dict(), "t": mx(64, 7, axis=0, dtype=torch.bfloat16).t()}
    tensors, metadata = flatten_state(state)
    assert set(tensors) == {"0.weight.qdata", "0.weight.scale", "0.bias", "1.weight", "1.bias", "t.qdata", "t.scale"}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", {**metadata, "format": "pt"})
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        loaded = unflatten_state({key: file.get_tensor(key) for key in file.keys()}, file.metadata())
    assert set(loaded) == set(state)
    assert same(loaded["0.weight"], state["0.weight"]) and torch.equal(loaded["1.bias"], state["1.bias"])
    assert same(loaded["t"], state["t"]) and torch.equal(loaded["t"].to_dtype(), state["t"].to_dtype())
    with pytest.raises(MXError, match=r"its part 't\.scale' is missing"):
        unflatten_state({"t.qdata": tensors["t.qdata"]}, {"pt2mx:t": metadata["pt2mx:t"]})
    with pytest.raises(MXError, match=r"t\.scale is a tensor of the state already"):
        flatten_state({**state, "t.scale": torch.ones(1)})
    assert unflatten_state({"a": torch.ones(1)}, None) == {"a": torch.ones(1)}


def test_fake_tensors():
    x = mx(4, 70, elem="fp6_e2m3").t()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert isinstance(fake, MXTensor) and fake.shape == (70, 4) and fake.qdata.shape == (54, 4)
        assert fake.to_dtype(torch.bfloat16).stride() == (1, 70)
        made = MXTensor.to_mx(torch.randn(3, 64), "mxfp4") @ torch.randn(64, 2)
        assert made.shape == (3, 2)


def test_compiled_parameter(compiler):
    model, x = parameter_model(), torch.randn(5, 70)
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x))


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


def test_compiled_with_tensors_that_come_and_go(compiler):
    def function(x):
        return x.transpose(0, 1).reshape(-1, 64)[2:10].unsqueeze(0), x.to_dtype() * 2

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for rows in (8, 9, 11):
        x = mx(4, rows, 64, elem="fp4_e2m1")
        (view, values), (expected_view, expected) = compiled(x), function(x)
        assert same(view, expected_view) and view.stride() == expected_view.stride()
        assert torch.equal(values, expected)


def test_export():
    model, x = parameter_model(), torch.randn(5, 70)
    program = torch.export.export(model, (x,))
    assert "pt2mx.dequantize_mx.default" in {str(node.target) for node in program.graph.nodes}
    assert torch.equal(program.module()(x), model(x))
