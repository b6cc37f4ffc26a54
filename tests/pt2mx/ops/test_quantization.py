import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck

import pt2mx
from pt2mx import FORMATS, MXError, dequantize_mx, fake_quantize_mx, ops, quantize_mx
from tests.operators import opchecks


@pytest.mark.diagonal
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize(("name", "checks"), opchecks(FORMATS))
def test_opcheck(name, checks, axis):
    x = torch.randn(4, 70, requires_grad=True)
    opcheck(ops.quantize_mx, (x, name, 32, axis, "floor", "even"), test_utils=checks)
    opcheck(ops.fake_quantize_mx, (x, name, 32, axis, "rceil", "even", None, "identity"), test_utils=checks)
    opcheck(ops.fake_quantize_mx, (x, name, 32, axis, "mse", "stochastic", 3, "clipped"), test_utils=checks)
    opcheck(ops.clip_gradient_mx, (torch.randn(4, 70), x.detach(), name, 32, axis, "floor", "even"), test_utils=checks)
    scale, data = ops.quantize_mx(x, name, 32, axis, "floor", "even")
    opcheck(ops.dequantize_mx, (data, scale, name, 32, torch.bfloat16, axis, x.shape[axis]), test_utils=checks)


@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4"])
def test_the_derivative_in_forward_mode_passes_straight_through(spec):
    x, tangent = torch.randn(2, 3, 32)
    y, of_y = torch.func.jvp(lambda x: 2 * fake_quantize_mx(x, spec), (x,), (tangent,))
    assert torch.equal(y, 2 * fake_quantize_mx(x, spec)) and torch.equal(of_y, 2 * tangent)
    assert torch.equal(torch.func.jacfwd(lambda x: fake_quantize_mx(x, "mxfp4"))(x[0]), torch.eye(32))
    with pytest.raises(MXError, match="ste='clipped' has no forward-mode derivative: choose ste='identity'"):
        torch.func.jvp(lambda x: fake_quantize_mx(x, spec, ste="clipped"), (x,), (tangent,))


def test_an_operator_refuses_a_tangent():
    """torch would drop it silently, and the derivative would be zero."""
    x, tangent = torch.randn(2, 3, 32)
    scale, data = quantize_mx(torch.randn(4, 32), "mxfp4")
    calls = {
        "fake_quantize_mx": lambda x: ops.fake_quantize_mx(x, "fp4_e2m1", 32, -1, "floor", "even", None, "identity"),
        "quantize_mx": lambda x: ops.quantize_mx(x, "fp4_e2m1", 32, -1, "floor", "even")[0],
        "linear_mx": lambda x: torch.ops.pt2mx.linear_mx(x, data, scale, None, "fp4_e2m1", 32, 0),
    }
    for name, call in calls.items():
        call(x)
        message = f"{name} has no derivative in forward mode: call backward.*, or .* pt2mx.fake_quantize_mx"
        with pytest.raises(MXError, match=message):
            torch.func.jvp(call, (x,), (tangent,))
        with forward_ad.dual_level():
            call(x)
            with pytest.raises(MXError, match=message):
                call(forward_ad.make_dual(x, tangent))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_passes_straight_through(dtype):
    x = torch.randn(3, 70, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 70, dtype=dtype)
    (fake_quantize_mx(x, "mxfp4") * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_codes_carry_no_gradient():
    scale, data = quantize_mx(torch.randn(2, 32, requires_grad=True), "mxfp8")
    assert not scale.requires_grad and not data.requires_grad


@pytest.mark.parametrize("name", FORMATS)
def test_fake_kernels_give_the_shapes_of_the_real_ones(name):
    x = torch.randn(3, 41, 5)
    for axis in (0, 1, 2):
        scale, data = quantize_mx(x, name, 16, axis)
        meta_scale, meta_data = quantize_mx(x.to("meta"), name, 16, axis)
        assert (meta_scale.shape, meta_data.shape) == (scale.shape, data.shape)
        again = dequantize_mx(meta_data, meta_scale, name, 16, torch.float16, axis, x.shape[axis])
        assert again.shape == x.shape and again.dtype == torch.float16
        assert fake_quantize_mx(x.to("meta"), name, 16, axis).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("function", [quantize_mx, fake_quantize_mx])
def test_other_dtypes_are_refused(function, dtype):
    with pytest.raises(MXError, match=r"allowed are float32, float16 and bfloat16; cast it first"):
        function(torch.ones(2, 32).to(dtype), "mxfp8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mxfp8", 0), "block_size=0 must be an integer of at least 1"),
        (("mxfp8", -1), "block_size=-1"),
        (("mxfp8", 32, 2), r"axis=2 is out of range for shape \(2, 32\): allowed are -2 to 1"),
        (("mxfp8", 32, -3), "axis=-3 is out of range"),
        (("mxfp9",), "did you mean 'mxfp8'"),
        (("mxfp8", 32, -1, "flor"), "did you mean 'floor'"),
        (("mxfp8", 32, -1, "floor", "evn"), "did you mean 'even'"),
        (("mxfp8", 2**70), "block_size=1180591620717411303424"),
        (("mxfp8", 32, 2**70), "axis=1180591620717411303424"),
    ],
)
@pytest.mark.parametrize("function", [quantize_mx, fake_quantize_mx])
def test_bad_arguments(function, arguments, message):
    with pytest.raises(MXError, match=message):
        function(torch.ones(2, 32), *arguments)


def test_bad_operator_arguments_are_the_same_errors():
    x = torch.ones(2, 32)
    with pytest.raises(MXError, match="block_size=0"):
        torch.ops.pt2mx.quantize_mx(x, "fp8_e4m3", 0, -1, "floor", "even")
    with pytest.raises(MXError, match="unknown MX element format 'fp3'"):
        torch.ops.pt2mx.fake_quantize_mx(x, "fp3", 32, -1, "floor", "even", None, "identity")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, "data must be a torch.Tensor, not NoneType"),
        ({"data": torch.zeros(2, 16, dtype=torch.uint8).view(torch.float8_e5m2)}, "not torch.float8_e5m2"),
        ({"data": torch.zeros(2, 16)}, "codes and scales are uint8, not torch.float32"),
        ({"scale": torch.zeros(2, 1, dtype=torch.int32)}, "codes and scales are uint8"),
        ({"target_dtype": torch.float64}, "cannot dequantize to torch.float64"),
        ({"target_dtype": None}, "target_dtype must be torch.float32, float16 or bfloat16, not None"),
        ({"target_dtype": torch.int8}, "cannot dequantize to torch.int8"),
        ({"length": 31}, None),
        ({"length": 30}, "data has 16 bytes along dimension 1, but 30 codes of fp4_e2m1 take 15"),
        ({"scale": torch.zeros(2, 2, dtype=torch.uint8)}, r"scale of shape \(2, 2\) does not fit data"),
        ({"scale": torch.zeros(1, dtype=torch.uint8)}, "does not fit"),
        ({"block_size": 16}, r"in blocks of 16 along dimension 1 have \(2, 2\)"),
        ({"axis": 2}, "axis=2 is out of range"),
    ],
)
def test_dequantize_checks_that_its_parts_fit(change, message):
    scale, data = quantize_mx(torch.randn(2, 32), "mxfp4")
    arguments = {"data": data, "scale": scale, "elem_dtype": "mxfp4", "block_size": 32} | change
    if message is None:
        assert dequantize_mx(**arguments).shape == (2, 31)
        return
    with pytest.raises(MXError, match=message):
        dequantize_mx(**arguments)


def test_spec_or_spelling_sets_the_other_arguments():
    x = torch.randn(4, 64)
    want = fake_quantize_mx(x, "fp4_e2m1", 16, 0, "rceil")
    assert torch.equal(fake_quantize_mx(x, "mxfp4{16,0}(rceil)"), want)
    assert torch.equal(fake_quantize_mx(x, pt2mx.MXSpec("mxfp4", 16, 0, "rceil")), want)
    assert torch.equal(fake_quantize_mx(x, "mxfp4{32,0}(rceil)", block_size=16), want)


@pytest.mark.parametrize("x", [None, [1.0, 2.0], 3.0])
@pytest.mark.parametrize("function", [quantize_mx, fake_quantize_mx])
def test_what_is_no_tensor_is_refused(function, x):
    with pytest.raises(MXError, match=r"x must be a torch.Tensor, not \w+: convert it with torch.as_tensor"):
        function(x, "mxfp4")


@pytest.mark.parametrize("shape", [(64,), (3, 33), (33, 3), ()])
def test_output_is_a_tensor_of_its_own(shape):
    """In-place operators on it work, and it keeps no padding alive."""
    x = torch.randn(shape, requires_grad=True)
    for axis in range(-len(shape), 0):
        y = fake_quantize_mx(x * 1, "mxfp4", axis=axis)
        assert y.untyped_storage().nbytes() == y.nbytes
        y.relu_().sum().backward()


def test_float8_views_of_codes_and_scales():
    x = torch.randn(4, 64)
    scale, data = quantize_mx(x, torch.float8_e4m3fn)
    y = dequantize_mx(data.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), "mxfp8")
    assert torch.equal(y, fake_quantize_mx(x, "mxfp8"))


# ---- the gradient of a pair, quantize_mx then dequantize_mx ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "axis"), [((3, 41), -1), ((5, 7, 3), 1), ((), -1)])
def test_a_pair_passes_the_gradient_as_fake_quantization_does(shape, axis, dtype):
    x, weight = torch.randn(shape, dtype=dtype, requires_grad=True), torch.randn(shape, dtype=dtype)
    scale, data = ops.quantize_mx(x, "fp4_e2m1", 32, axis, "floor", "even")
    assert not scale.requires_grad and not data.requires_grad
    length = x.shape[axis] if shape else 1
    y = ops.dequantize_mx(data, scale, "fp4_e2m1", 32, dtype, axis, length).reshape(shape)
    assert torch.equal(y, fake_quantize_mx(x, "mxfp4", axis=axis))
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_it_is_cast_to_the_dtype_of_what_was_quantized():
    x = torch.randn(2, 32, dtype=torch.bfloat16, requires_grad=True)
    scale, data = ops.quantize_mx(x, "fp8_e4m3", 32, -1, "floor", "even")
    ops.dequantize_mx(data, scale, "fp8_e4m3", 32, torch.float32, -1).sum().backward()
    assert x.grad.dtype == torch.bfloat16 and (x.grad == 1).all()


def test_without_a_gradient_codes_remember_nothing():
    for x, recording in ((torch.randn(2, 32), True), (torch.randn(2, 32, requires_grad=True), False)):
        with torch.set_grad_enabled(recording):
            scale, data = ops.quantize_mx(x, "fp8_e4m3", 32, -1, "floor", "even")
            assert (
                not vars(data) and not ops.dequantize_mx(data, scale, "fp8_e4m3", 32, torch.float32, -1).requires_grad
            )


def test_a_length_that_was_not_passed_is_asked_for():
    scale, data = ops.quantize_mx(torch.randn(2, 33, requires_grad=True), "fp4_e2m1", 32, -1, "floor", "even")
    with pytest.raises(MXError, match=r"gives 68 values of codes that hold 66.*pass the length"):
        ops.dequantize_mx(data, scale, "fp4_e2m1", 32, torch.float32, -1)
    with torch.no_grad():
        assert ops.dequantize_mx(data, scale, "fp4_e2m1", 32, torch.float32, -1).shape == (2, 34)
