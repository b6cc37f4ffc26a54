"""The trailing arguments of scales: scale_format, block_rows, tensor_scale; and tensor_scale_mx."""

import io

import pytest
import torch
from torch.export import export

import pt2mx
from pt2mx import MXError, parse
from pt2mx.ops.cache import StoreMX
from pt2mx.ops.quantization import Dequantize, FakeQuantize, Quantize
from tests.compare import same
from tests.float_scale_operators import NAMES, values
from tests.operators import opchecks

ops = torch.ops.pt2mx


def arguments(name, x):
    """The spec, and the arguments of quantize_mx behind the values."""
    spec = parse(name)
    t = ops.tensor_scale_mx(x, "fp4_e2m1", "nearest", spec.scale_format.name) if spec.scale_format.tensor else None
    return spec, Quantize(x, spec, tensor_scale=t).args[1:]


@pytest.mark.parametrize(("name", "checks"), opchecks(NAMES))
def test_opcheck(name, checks):
    x = torch.randn(5, 6, 70)
    spec, args = arguments(name, x)
    scale, data = ops.quantize_mx(x, *args)
    blocks = spec.element.name, spec.block_size, torch.float32, -1, 70
    torch.library.opcheck(ops.quantize_mx.default, (x, *args), test_utils=checks)
    torch.library.opcheck(ops.dequantize_mx.default, (data, scale, *blocks, *args[6:]), test_utils=checks)
    for ste in ("identity", "clipped"):
        leaf = x.clone().requires_grad_()
        torch.library.opcheck(ops.fake_quantize_mx.default, (leaf, *args[:6], ste, *args[6:]), test_utils=checks)
        torch.library.opcheck(ops.fake_quantize_mx.default, (leaf, *args[:6], ste, *args[6:8]), test_utils=checks)
    torch.library.opcheck(ops.clip_gradient_mx.default, (x, x, *args[:5], *args[6:]), test_utils=checks)
    weight, leaf = torch.randn(32, 64), torch.randn(6, 64, requires_grad=True)
    _, args = arguments(name, weight)
    scale, data = ops.quantize_mx(weight, *args)
    operands = leaf, data, scale, torch.randn(32), *args[:2], 0, None, *args[6:]
    torch.library.opcheck(ops.linear_mx.default, operands, test_utils=checks)


def test_opcheck_of_the_tensor_scale():
    for x in (torch.randn(3, 4), torch.randn(()), torch.zeros(2), torch.empty(0, 3), torch.randn(3).bfloat16()):
        torch.library.opcheck(ops.tensor_scale_mx.default, (x, "fp4_e2m1", "nearest", "e4m3_f32"))
    x = torch.randn(3, requires_grad=True)
    assert not ops.tensor_scale_mx(x, "fp4_e2m1", "nearest", "e4m3_f32").requires_grad


def test_values_of_the_tensor_scale():
    x = torch.tensor([1.0, -2688.0 * 4, torch.nan, torch.inf])
    assert ops.tensor_scale_mx(x, "fp4_e2m1", "nearest", "e4m3_f32") == 4.0
    assert ops.tensor_scale_mx(x, "fp4_e2m1", "nearest", "e4m3_f32_divisor") == 0.25
    assert ops.tensor_scale_mx(x, "fp4_e2m1", "four_six", "e4m3_f32") == 7.0  # 10752 / (6 * 256)
    assert ops.tensor_scale_mx(torch.zeros(4), "fp4_e2m1", "nearest", "e4m3_f32") == 1.0


def test_a_nan_of_the_tensor_scale_gives_nan():
    x, nan = torch.ones(2, 32), torch.tensor(torch.nan)
    assert FakeQuantize(x, parse("nvfp4"), None, "identity", nan).call().isnan().all()
    scale, data = pt2mx.quantize_mx(x, "nvfp4", tensor_scale=nan)
    assert (scale == 0x7F).all() and not data.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_results_keep_the_order_in_memory(name, order):
    """Values do not depend on the order: rows are counted along a dimension of the shape."""
    x = torch.randn(3, 70, 4, 5)
    laid_out = x.permute(order).contiguous().permute([order.index(d) for d in range(4)])
    spec = parse(name, axis=1)
    t = pt2mx.tensor_scale_mx(x, spec) if spec.scale_format.tensor else None
    got, want = (pt2mx.quantize_mx(each, spec, tensor_scale=t) for each in (laid_out, x))
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    assert got[1].permute(order).is_contiguous()
    fake = pt2mx.fake_quantize_mx(laid_out, spec, tensor_scale=t)
    assert fake.stride() == laid_out.stride() and same(fake, pt2mx.fake_quantize_mx(x, spec, tensor_scale=t))


def test_gradients():
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0] * 4, [0.1] * 15 + [100.0]])
    leaf = x.clone().requires_grad_()
    pt2mx.fake_quantize_mx(leaf, "nvfp4").mul(torch.arange(16.0)).sum().backward()
    assert torch.equal(leaf.grad, torch.arange(16.0).expand(2, 16))
    leaf, t = x.clone().requires_grad_(), torch.tensor(1 / 64, requires_grad=True)  # the largest scale is 7: to 42
    pt2mx.fake_quantize_mx(leaf, "nvfp4", ste="clipped", tensor_scale=t).sum().backward()
    assert torch.equal(leaf.grad, (x < 43).float()) and t.grad is None
    leaf = x.clone().requires_grad_()
    t = pt2mx.tensor_scale_mx(leaf, "nvfp4")
    spec = parse("nvfp4")
    scale, data = Quantize(leaf, spec, tensor_scale=t).call()
    Dequantize(data, scale, spec, torch.float32, 16, t).call().sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2, 16))


def test_what_does_not_fit_is_an_error():
    x, one = torch.randn(4, 32), torch.ones(())
    nv, rows = parse("nvfp4"), parse("fp8_e4m3{2x32}(f32)")
    args = Quantize(x, nv).args[1:-1]
    with pytest.raises(MXError, match=r"has a tensor scale: pass tensor_scale, for example tensor_scale_mx"):
        ops.quantize_mx(x, *args)
    for wrong, message in (
        (torch.ones(2), r"must be one float32 number, not of shape \(2,\)"),
        (torch.ones((), dtype=torch.float64), "must be one float32 number, not of shape \\(\\) and torch.float64"),
        (torch.ones((), device="meta"), "tensor_scale is on meta and the tensor on cpu"),
    ):
        with pytest.raises(MXError, match=message):
            ops.quantize_mx(x, *args, wrong)
    scale, data = ops.quantize_mx(x, *args, one)
    with pytest.raises(MXError, match="has no tensor scale, but tensor_scale was passed"):
        ops.dequantize_mx(data, scale, "fp4_e2m1", 16, torch.float32, -1, 32, "e4m3", None, one)
    with pytest.raises(
        MXError, match=r"are torch.uint8 and scales torch.float32, not torch.uint8 and torch.uint8: pass"
    ):
        ops.dequantize_mx(data, scale, "fp4_e2m1", 16, torch.float32, -1, 32, "f32")
    scale, data = Quantize(x, rows).call()
    assert scale.shape == (2, 1) and scale.dtype == torch.float32
    with pytest.raises(MXError, match=r"scale of shape \(2, 1\) does not fit .* in blocks of 4x32 along dimension 1"):
        ops.dequantize_mx(data, scale, "fp8_e4m3", 32, torch.float32, -1, None, "f32", 4)
    for name in ("e4m2", ""):
        with pytest.raises(MXError, match=f"unknown scale format '{name}'"):
            ops.quantize_mx(x, *args[:6], name)
    with pytest.raises(MXError, match="unknown scale_mode 'floor' of e4m3 scales"):
        ops.quantize_mx(x, "fp4_e2m1", 16, -1, "floor", "even", None, "e4m3")
    with pytest.raises(MXError, match="blocks of 2 rows along axis=-1 need a second dimension"):
        Quantize(x[0], rows).call()
    with pytest.raises(MXError, match="e4m3 has no tensor scale: allowed are"):
        ops.tensor_scale_mx(x, "fp4_e2m1", "nearest", "e4m3")


def test_calls_without_them_are_as_before():
    """Older calls and files name no scale format: they mean E8M0, in one row, and so does the name `e8m0`."""
    x = values()
    old = ops.quantize_mx(x, "fp4_e2m1", 32, -1, "floor", "even")
    for scales in ((), ("e8m0", 1), (None, None, None)):
        assert all(map(torch.equal, ops.quantize_mx(x, "fp4_e2m1", 32, -1, "floor", "even", None, *scales), old))
    program = export(torch.nn.ReLU(), (x,))  # a program of an older version holds the arguments of its schema
    graph = program.graph_module.graph
    (relu,) = (node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_before(relu):
        args = relu.args[0], "fp4_e2m1", 32, -1, "floor", "even", None, "identity"
        fake = graph.call_function(ops.fake_quantize_mx.default, args)
        fake.meta["val"] = relu.args[0].meta["val"]
    relu.args = (fake,)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    assert same(loaded.module()(x), pt2mx.fake_quantize_mx(x, "mxfp4").relu())
    (call,) = (node for node in loaded.graph.nodes if node.target == ops.fake_quantize_mx.default)
    assert len(call.args) == 8 and not call.kwargs


def test_linear_layers():
    """linear_mx and grouped_linear_mx of weights with scales of each kind are those of the dequantized weight."""
    x, bias = torch.randn(6, 64), torch.randn(32)
    offs = torch.tensor([2, 6], dtype=torch.int32)
    for name in NAMES:
        weight = torch.randn(2, 32, 64)
        _, args = arguments(name, weight)
        scale, data = ops.quantize_mx(weight, *args)
        dense = ops.dequantize_mx(data, scale, *args[:2], torch.float32, -1, 64, *args[6:])
        t = args[-1] if args[-1] is None else args[-1].reshape(1)  # as some files hold it
        got = ops.grouped_linear_mx(x, data, scale, offs, *args[:2], None, *args[6:-1], t)
        want = torch.cat([x[:2] @ dense[0].T, x[2:] @ dense[1].T])
        torch.testing.assert_close(got, want, msg=name)
        leaf = x.clone().requires_grad_()
        operands = leaf, data[0], scale[0], bias, *args[:2], 0, None, *args[6:]
        torch.testing.assert_close(ops.linear_mx(*operands), x @ dense[0].T + bias)
        ops.linear_mx(*operands).sum().backward()
        torch.testing.assert_close(leaf.grad, dense[0].sum(0).expand(6, 64))
        with torch.autocast("cpu", torch.bfloat16):
            y = ops.linear_mx(*operands)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), x @ dense[0].T + bias, rtol=0.05, atol=0.3)


@pytest.mark.compiled_except("e4m3_f32")
@pytest.mark.parametrize("scale_format", ["e4m3_f32", "e4m3_f32_divisor"])
def test_a_tensor_scale_of_each_matrix(scale_format):
    """The bits equal the bits of each matrix alone, also with the experts inside in memory, and compiled."""
    spec = pt2mx.MXSpec("fp4_e2m1", 16, scale_format=scale_format)
    weight = torch.randn(3, 40, 96) * torch.tensor([1.0, 30.0, 0.01]).view(-1, 1, 1)
    t = torch.stack([pt2mx.tensor_scale_mx(one, spec) for one in weight])
    packed = [pt2mx.quantize_mx(one, spec, tensor_scale=s) for one, s in zip(weight, t, strict=True)]
    scale, data = (torch.stack(tensors) for tensors in zip(*packed, strict=True))
    want = torch.stack([pt2mx.dequantize_mx(d, s, spec, tensor_scale=x) for (s, d), x in zip(packed, t, strict=True)])
    last = scale_format, None, t
    args = "fp4_e2m1", 16, torch.float32, -1, None, *last
    inside = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in (data, scale)]
    for tensors in ((data, scale), inside):
        assert torch.equal(ops.dequantize_mx(*tensors, *args), want)
        torch.library.opcheck(ops.dequantize_mx.default, (*tensors, *args))
    assert torch.equal(torch.compile(ops.dequantize_mx, fullgraph=True, backend="aot_eager")(data, scale, *args), want)
    x, offs = torch.randn(50, 96), torch.tensor([7, 7, 50], dtype=torch.int32)
    operands = data, scale, offs, "fp4_e2m1", 16
    got = ops.grouped_linear_mx(x, *operands, None, *last)
    each = [ops.linear_mx(x[rows], data[i], scale[i], None, "fp4_e2m1", 16, 0, None, *last[:2], t[i])
            for i, rows in ((0, slice(7)), (2, slice(7, 50)))]  # fmt: skip
    assert torch.equal(got, torch.cat(each))
    torch.library.opcheck(ops.grouped_linear_mx.default, (x.requires_grad_(), *operands, None, *last))
    same_for_all = (ops.grouped_linear_mx(x, *operands, None, *last[:2], torch.full(n, 0.5)) for n in ((), (1,), (3,)))
    assert len({tuple(y.flatten().tolist()) for y in same_for_all}) == 1
    with pytest.raises(MXError, match=r"one float32 number, or one for each of the 3 matrices, not of shape \(2,\)"):
        ops.grouped_linear_mx(x, *operands, None, *last[:2], t[:2])
    with pytest.raises(MXError, match=r"must be one float32 number, not of shape \(40,\)"):
        ops.dequantize_mx(data[0], scale[0], *args[:-1], torch.ones(40))


def test_a_spec_is_joined_from_its_arguments_and_taken_apart():
    spec = parse("fp8_e4m3{2x32}(f32)", axis=1)
    call = Dequantize("codes", "scale", spec, torch.float32, 5)
    assert call.args == ("codes", "scale", "fp8_e4m3", 32, torch.float32, 1, 5, "f32", 2, None)
    assert Dequantize.from_args(*call.args) == call
    plain = Dequantize("codes", "scale", parse("mxfp4"), torch.float32)
    assert plain.args == ("codes", "scale", "fp4_e2m1", 32, torch.float32, -1, None, None, None, None)
    assert Dequantize.from_args(*plain.args[:6]) == plain
    with pytest.raises(MXError, match=r"this takes E8M0 scales .* of one row only"):
        StoreMX(*range(7), spec).call()  # its schema names no scales
    with pytest.raises(MXError, match="of other widths than scale_exp_bits=8"):
        Quantize(torch.ones(4), parse("mxfp4{4}(e5m0)")).call()
    with pytest.raises(MXError, match=r"'mxfp4' is no MXSpec: give pt2mx\.parse"):
        Quantize(torch.ones(4), "mxfp4").call()
