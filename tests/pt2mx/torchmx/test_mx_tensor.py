import copy
import io

import pytest
import torch

import pt2mx
from pt2mx import MXError
from pt2mx.torchmx import dtypes
from pt2mx.torchmx.mx_tensor import FromMXConstrFunc, MXTensor, NoopFwToMXBw, ToMXConstrFunc, dequantize_mx, quantize_mx

DTYPES = [*dtypes.SUPPORTED_ELEM_DTYPES, dtypes.float8_e5m2]
EVERY = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def numbers(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(shape) * torch.randn(*shape[:-1], 1).mul(4).exp()).bfloat16()


@EVERY
@pytest.mark.parametrize("shape", [(4, 64), (3, 70), (2, 3, 37)])
def test_its_parts_make_it_again(dtype, shape):
    x = numbers(*shape)
    t = MXTensor.to_mx(x, dtype, block_size=16)
    assert torch.equal(t.to_dtype(torch.float32), pt2mx.fake_quantize_mx(x.float(), dtype, 16))
    padding = -shape[-1] % 16
    described = (t._elem_dtype, t._block_size, t._orig_dtype, t._padding, t._block_dim)
    assert described == (dtype, 16, torch.bfloat16, padding, len(shape) - 1)
    assert t._data.dtype == (torch.int8 if dtype is dtypes.int8 else torch.uint8)
    again = MXTensor(t._scale_e8m0, t._data, dtype, 16, torch.bfloat16, padding, t._block_dim)
    assert torch.equal(again.to_dtype(), t.to_dtype()) and again.shape == x.shape
    turned = t.transpose(0, 1)
    assert type(turned) is MXTensor and turned._block_dim == (0 if len(shape) == 2 else 2)
    assert torch.equal(turned._data, t._data.transpose(0, 1))
    assert torch.equal(turned._scale_e8m0, t._scale_e8m0.transpose(0, 1))
    if not padding:
        scale, data = quantize_mx(data_hp=x, elem_dtype_name=dtype.name, block_size=16)
        assert torch.equal(scale, t._scale_e8m0) and torch.equal(data, t._data)
        back = dequantize_mx(data, scale, dtype.name, 16, torch.float32, -1)
        assert torch.equal(back, t.to_dtype(torch.float32))


def test_bytes_are_torchmxs():
    x = torch.tensor([[1.0, -6.0, 0.5, 0.0, 3.0]])
    t = MXTensor.to_mx(x, dtypes.float4_e2m1, 4)
    assert t._data.tolist() == [[0x2F, 0x10, 0x70]] and t._scale_e8m0.tolist() == [[127, 126]] and t._padding == 3
    t = MXTensor.to_mx(x, dtypes.int8, 4)
    assert t._data.tolist() == [[16, -96, 8, 0, 96]] and t._scale_e8m0.tolist() == [[127 + 2 - 6, 127 + 1 - 6]]
    t = MXTensor.to_mx(x, dtypes.float6_e2m3, 4)
    assert t._data.tolist() == [[8, 60, 4, 0, 28]] and t.qdata.shape == (1, 6)


def test_the_first_dimension_as_block_dim():
    scale, data = torch.full((2, 3), 127, dtype=torch.uint8), torch.full((4, 3), 0x23, dtype=torch.uint8)
    t = MXTensor(scale, data, dtypes.float4_e2m1, 4, torch.float32, block_dim=0)
    assert t.shape == (8, 3) and t._block_dim == 0 and t.to_dtype()[:, 0].tolist() == [1.0, 1.5] * 4
    assert torch.equal(MXTensor(scale, data, dtypes.float4_e2m1, 4, torch.float32, 0, -2).to_dtype(), t.to_dtype())


def test_matmuls_and_views_keep_the_class():
    a, b = MXTensor.to_mx(numbers(2, 3, 5, 32), "mxfp8"), MXTensor.to_mx(numbers(2, 3, 7, 32), "mxfp4")
    matmul = torch.matmul(a, b.transpose(2, 3))
    assert type(matmul) is torch.Tensor
    assert torch.equal(matmul, torch.matmul(a.to_dtype(), b.to_dtype().transpose(2, 3)))
    for view in (a.reshape(6, 5, 32), a[:1], a.detach(), a.expand(2, 3, 5, 32), a.clone(), copy.deepcopy(a)):
        assert type(view) is MXTensor and view._block_dim == view.dim() - 1
    file = io.BytesIO()
    torch.save({"a": torch.nn.Parameter(a, requires_grad=False)}, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)["a"]
    assert isinstance(loaded, MXTensor) and torch.equal(loaded._data, a._data)


def test_gradients():
    x = numbers(4, 32).float().requires_grad_()
    weight = torch.randn(4, 32)
    t = ToMXConstrFunc.apply(x, dtypes.float8_e4m3, 32)
    (FromMXConstrFunc.apply(t, torch.float32) * weight).sum().backward()
    assert type(t) is MXTensor and torch.equal(x.grad, weight)
    x.grad = None
    (MXTensor.to_mx(x, dtypes.float8_e4m3).to_dtype() * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_a_gradient_cast_to_mx_goes_on_through_matmuls():
    x, w = torch.randn(4, 32, requires_grad=True), torch.randn(8, 32, requires_grad=True)
    weight = torch.randn(4, 8)
    y = NoopFwToMXBw.apply(torch.nn.functional.linear(x, w), dtypes.float4_e2m1, 8)
    assert torch.equal(y, torch.nn.functional.linear(x, w))
    (y * weight).sum().backward()
    gradient = pt2mx.fake_quantize_mx(weight, "mxfp4", 8)
    assert torch.equal(x.grad, gradient @ w) and torch.equal(w.grad, gradient.t() @ x)


def test_compile(compiler):
    def run(x, w):
        return torch.nn.functional.linear(MXTensor.to_mx(x, dtypes.float8_e4m3), w).relu()

    x, w = numbers(4, 32), MXTensor.to_mx(numbers(8, 32), dtypes.float6_e3m2)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w), run(x, w))
    turned = torch.compile(lambda x: MXTensor.to_mx(x, "mxfp4").t(), fullgraph=True, backend="aot_eager")(x)
    assert type(turned) is MXTensor and torch.equal(turned._data, MXTensor.to_mx(x, "mxfp4")._data.t())


@EVERY
def test_sums_are_those_of_the_values(dtype, compiler):
    t = MXTensor.to_mx(numbers(3, 40), dtype, block_size=16)
    values = t.to_dtype()
    for dims in (0, -1, [0, 1]):
        assert type(t.sum(dims)) is torch.Tensor and torch.equal(t.sum(dims), values.sum(dims))
    wide = {"dim": 1, "keepdim": True, "dtype": torch.float32}
    assert torch.equal(torch.sum(t, **wide), torch.sum(values, **wide))
    x = numbers(3, 40).float().requires_grad_()
    (MXTensor.to_mx(x, dtype).sum(0) * torch.arange(40)).sum().backward()
    assert torch.equal(x.grad, torch.arange(40.0).expand(3, 40))
    compiled = torch.compile(lambda x: MXTensor.to_mx(x, dtype).sum(0), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), MXTensor.to_mx(x, dtype).sum(0))


def test_the_dtype_in_which_codes_are_read_can_be_set():
    torch.manual_seed(0)
    q, k = (MXTensor.to_mx(torch.randn(5, 2, 8, 70).bfloat16(), dtypes.float4_e2m1) for _ in range(2))
    weight = torch.nn.Parameter(MXTensor.to_mx(torch.randn(8, 70).bfloat16(), dtypes.int8), requires_grad=False)
    codes = q._data
    for t in (q, k, weight):
        t._orig_dtype = torch.float32
        assert t._orig_dtype == t.dtype == t.to_dtype().dtype == t.transpose(0, 1)._orig_dtype == torch.float32
    assert torch.equal(q._data, codes) and isinstance(weight, torch.nn.Parameter)
    matmul = torch.matmul(q, k.transpose(2, 3))
    assert torch.equal(matmul, torch.matmul(q.to_dtype(), k.to_dtype().transpose(2, 3)))
    assert matmul.dtype == q.sum(0).dtype == torch.float32
    x = torch.randn(4, 32, requires_grad=True)
    t = MXTensor.to_mx(x, dtypes.int8)
    t._orig_dtype = torch.bfloat16
    t.to_dtype().sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 32))
    for bad in (torch.float64, torch.int8, "float32", None):
        with pytest.raises(MXError, match="cannot dequantize to"):
            q._orig_dtype = bad


@pytest.mark.compiled
def test_compiled_functions_see_which_dtype_comes_in(compiler):
    def run(x, dtype):
        return MXTensor.to_mx(x, dtype).to_dtype()

    compiled, x = torch.compile(run, fullgraph=True, backend="aot_eager"), numbers(4, 32)
    for dtype in DTYPES:
        assert torch.equal(compiled(x, dtype), run(x, dtype))


SCALE, DATA = torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(2, 64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: MXTensor(SCALE, DATA, dtypes.int8, 16, torch.float32), "data has 64 bytes along dimension 1, but 32"),
        (
            lambda: MXTensor(SCALE, DATA, dtypes.int8, 32, torch.float32, 32),
            "padding=32 must be an integer from 0 to 31",
        ),
        (lambda: MXTensor(SCALE, DATA, dtypes.int8, 32, torch.float32, -1), "padding=-1"),
        (lambda: MXTensor(SCALE, DATA, dtypes.int8, 32, torch.float32, 1), "63 values|64 bytes"),
        (lambda: MXTensor(SCALE, DATA, dtypes.int8, 32, torch.float32, 0, 2), "no dimension 2 in common"),
        (lambda: MXTensor(SCALE[0], DATA, dtypes.int8, 32, torch.float32), "no dimension -1 in common"),
        (lambda: MXTensor(SCALE.int(), DATA, dtypes.int8, 32, torch.float32), "scale_e8m0_bits are uint8"),
        (lambda: MXTensor(SCALE, DATA.int(), dtypes.int8, 32, torch.float32), "codes are uint8 or int8"),
        (lambda: MXTensor(SCALE, DATA, dtypes.int8, 32, torch.float64), "float64"),
        (lambda: MXTensor(SCALE, DATA, "float9", 32, torch.float32), "unknown MX element format"),
        (lambda: MXTensor.to_mx(MXTensor.to_mx(torch.ones(32), "mxfp8"), "mxfp8"), "quantized already"),
        (lambda: MXTensor.to_mx(torch.full((32,), 1e-38), dtypes.int8)._data, "below what torchmx stores"),
    ],
)
def test_errors(make, match):
    with pytest.raises(MXError, match=match):
        make()
