"""The operators that take MXTensors: matmuls equal matmuls of the values, views move whole blocks."""

import pytest
import torch
import torch.nn.functional as F

import pt2mx
from pt2mx import MXError, MXTensor
from tests.mx_tensors import mx

DTYPES = [torch.float32, torch.bfloat16]
MATMULS = {
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


@pytest.mark.diagonal
@pytest.mark.parametrize("matmul", MATMULS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_matmuls_equal_those_of_the_values(matmul, dtype, inference):
    function, left, right = MATMULS[matmul]
    x = mx(*left, dtype=dtype)
    y = mx(*right, elem="fp4_e2m1", dtype=dtype, axis=-1 if len(right) == 1 or function is F.linear else -2)
    with torch.inference_mode(inference):
        for a, b in ((x, y), (x, y.to_dtype()), (x.to_dtype(), y)):
            out = function(a, b)
            assert type(out) is torch.Tensor
            assert torch.equal(out, function(x.to_dtype(), y.to_dtype()))


@pytest.mark.parametrize("name", ["mm", "matmul", "addmm", "linear"])
@pytest.mark.parametrize("inference", [False, True])
def test_aten_matmuls(name, inference):
    x, w, bias = mx(5, 64), mx(7, 64, elem="fp6_e2m3"), torch.randn(7)
    with torch.inference_mode(inference):
        operator = getattr(torch.ops.aten, name)
        args = {"addmm": (bias, x, w.t()), "linear": (x, w, bias)}.get(name, (x, w.t()))
        plain = [t.to_dtype() if isinstance(t, MXTensor) else t for t in args]
        assert torch.equal(operator(*args), operator(*plain))


def test_other_matmuls_by_function():
    bias, x, y = torch.randn(3, 5, 7), mx(3, 5, 64), mx(3, 64, 7, axis=1)
    assert torch.equal(torch.baddbmm(bias, x, y), torch.baddbmm(bias, x.to_dtype(), y.to_dtype()))
    assert torch.equal(torch.addmm(bias[0], x[0], y[0]), torch.addmm(bias[0], x[0].to_dtype(), y[0].to_dtype()))
    w, z = mx(7, 64, elem="fp4_e2m1"), torch.randn(5, 64)
    plain = w.to_dtype()
    for out, expected in (
        (z @ w.t(), z @ plain.t()),
        (F.linear(x, w, bias[0, 0]), F.linear(x.to_dtype(), plain, bias[0, 0])),
        (x.matmul(w.mT), x.to_dtype().matmul(plain.mT)),
    ):
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


@pytest.mark.diagonal
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("inference", [False, True])
def test_views_move_whole_blocks(view, inference):
    for elem in ("fp8_e4m3", "fp6_e2m3", "fp4_e2m1", "nvfp4{32}", "int8{32}(f32)"):
        assert_moves_whole_blocks(VIEWS[view], mx(4, 6, 128, elem=elem), inference)


def assert_moves_whole_blocks(view, x, inference):
    with torch.inference_mode(inference):
        result, expected = view(x), view(x.to_dtype())
        assert isinstance(result, MXTensor) and result.spec.replace(axis=x.axis) == x.spec
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


def test_blocks_of_several_rows_are_transposed_and_copied_whole():
    x = mx(64, 96, elem="fp8_e4m3{16x32}(f32)")
    values = x.to_dtype()
    for view in (lambda x: x.t(), lambda x: x.transpose(0, 1).contiguous(), lambda x: x.detach().clone()):
        assert torch.equal(view(x).to_dtype(), view(values)) and view(x).scale.numel() == 12
    y = torch.randn(3, 96)
    assert torch.equal(F.linear(y, x), F.linear(y, values)) and torch.equal(y @ x.t(), y @ values.t())
    for refused in (lambda x: x[:16], lambda x: x.view(2, 32, 96), lambda x: x.split(16), lambda x: torch.cat([x, x])):
        with pytest.raises(MXError, match=r"blocks of 16x32 .* of several rows, which only transposes and copies move"):
            refused(x)
    with pytest.raises(MXError, match=r"the order .* of its dimensions would split a block"):
        mx(4, 64, 96, elem="fp8_e4m3{16x32}(f32)").transpose(0, 1)


def test_tensors_of_one_tensor_scale_are_joined():
    x, y = mx(4, 64, elem="nvfp4"), mx(2, 64, elem="nvfp4")
    with pytest.raises(MXError, match="must have the tensor scale of"):
        torch.cat([x, y])
    y = MXTensor.to_mx(y.to_dtype(), "nvfp4", tensor_scale=x.tensor_scale.clone())
    both = torch.cat([x, y])
    assert torch.equal(both.to_dtype(), torch.cat([x.to_dtype(), y.to_dtype()]))
    both[4:].copy_(y)
    with pytest.raises(MXError, match="codes of another tensor scale, which the rest of the tensor shares"):
        both[4:].copy_(mx(2, 64, elem="nvfp4"))


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
