"""Products of values that bfloat16 holds on a GPU, no less exact than in float32, as tensor cores alone are."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pt2mx
from pt2mx import FORMATS, MXQuantizer, get_default_mx_quantization_config, ops
from pt2mx.ops.attention import attention_bfloat16, matmul_bfloat16
from pt2mx.ops.linear import linear_mx
from tests.attention import attend
from tests.compare import relative_error
from tests.flow import convert
from tests.graph import count
from tests.models import module_of

pytestmark = pytest.mark.cuda


def values(*shape):
    return torch.randn(shape, device="cuda").bfloat16().float()


def is_exact(got, product, exact):
    return relative_error(got, exact) <= max(1.3 * relative_error(product, exact), 1e-7)


@pytest.mark.parametrize("name", FORMATS)
def test_matmuls(name):
    torch.manual_seed(0)
    for batch, m, k, n in (((), 65, 64, 37), ((3,), 40, 1100, 33), ((2, 3), 130, 33, 100), ((2, 1, 2), 1, 300, 5)):
        x = ops.fake_quantize_mx(
            torch.randn(*batch, m, k, device="cuda"), name, 32, -1, "floor", "even", None, "identity"
        )
        y = ops.fake_quantize_mx(
            torch.randn(*batch, k, n, device="cuda"), name, 32, -2, "floor", "even", None, "identity"
        )
        got = matmul_bfloat16(x, y)
        assert got.dtype == torch.float32 and is_exact(got, x @ y, x.double() @ y.double())
        assert torch.equal(matmul_bfloat16(x, y.mT.contiguous().mT), got)
        assert torch.equal(matmul_bfloat16(x.mT.contiguous().mT, y), got)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 4096), (20, 300, 4096), (70, 96, 1000), (3000, 700, 384)])
def test_sums_of_many_terms(m, n, k):
    torch.manual_seed(0)
    x, y = values(m, k), values(k, n)
    exact = x.double() @ y.double()
    errors = [relative_error(product, exact) for product in (matmul_bfloat16(x, y), x @ y)]
    assert errors[0] <= max(1.3 * errors[1], 1e-7), errors


@pytest.mark.parametrize("rows", [(), (7,), (2, 50), (0,)])
def test_float32_matmuls_with_a_packed_weight(rows):
    torch.manual_seed(0)
    scale, data = ops.quantize_mx(torch.randn(300, 4096, device="cuda"), "fp8_e4m3", 32, -1, "floor", "even")
    weight = ops.dequantize_mx(data, scale, "fp8_e4m3", 32, torch.float32, -1)
    x, bias = values(*rows, 4096), torch.randn(300, device="cuda")
    got = linear_mx(x.bfloat16(), data, scale, bias, "fp8_e4m3", 32, 0, torch.float32)
    assert got.shape == (*rows, 300) and got.dtype == torch.float32
    if x.numel():
        exact = F.linear(x.double(), weight.double(), bias.double())
        errors = [relative_error(y, exact) for y in (got, F.linear(x, weight, bias))]
        assert is_exact(got, F.linear(x, weight, bias), exact), errors


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "key_heads", "queries", "keys", "width", "value_width"),
    [
        (3, 3, 20, 20, 32, 32),
        (4, 2, 33, 50, 40, 24),
        (2, 1, 200, 70, 128, 64),
        (1, 1, 70, 3000, 16, 100),
        (2, 2, 3, 9, 64, 64),
    ],
)
def test_attention(heads, key_heads, queries, keys, width, value_width, causal, dtype):
    torch.manual_seed(0)
    query = 2 * values(2, queries, heads, width).transpose(1, 2)
    key, value = (values(2, keys, key_heads, n).transpose(1, 2) for n in (width, value_width))
    options = {"is_causal": causal, "enable_gqa": heads != key_heads}
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), **options)
    product = F.scaled_dot_product_attention(query.to(dtype), key.to(dtype), value.to(dtype), **options)
    got = attend(query, key, value, None, causal, target_dtype=dtype)
    assert got.dtype == dtype and got.shape == product.shape and got.transpose(1, 2).is_contiguous()
    bound = 1.5 * relative_error(product, exact)
    assert relative_error(got, exact) <= max(bound, 3e-7)
    narrow = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), None, causal, target_dtype=dtype)
    assert torch.equal(narrow, got)


@pytest.mark.parametrize("shape", [(2, 3, 40, 1100), (40, 1100), (2, 1, 1, 1100), (3, 40, 1)])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(shape, added, dtype):
    torch.manual_seed(0)
    query, key, value = 2 * values(2, 3, 40, 32), values(2, 3, 1100, 32), values(2, 3, 1100, 32)
    mask = 3 * torch.randn(shape, device="cuda").to(dtype) if added else torch.rand(shape, device="cuda") < 0.7
    double = (mask.double() if added else mask).expand(2, 3, 40, 1100)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), double)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    product = F.scaled_dot_product_attention(query, key, value, mask.expand(2, 3, 40, 1100).contiguous())
    got = attend(query, key, value, mask)
    assert got.dtype == dtype
    assert relative_error(got, exact) <= max(1.5 * relative_error(product, exact), 3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_of_the_least_numbers_hides_nothing_from_a_query_that_sees_no_more(dtype):
    query, value = values(1, 2, 40, 32).to(dtype), values(1, 2, 50, 32).to(dtype)
    mask = torch.zeros(40, 50, dtype=dtype, device="cuda")
    mask[3], mask[4, 7:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    got = attend(query, value, value, mask).float()
    torch.testing.assert_close(got[:, :, 3], value.float().mean(2), rtol=0.01, atol=0.01)
    want = F.scaled_dot_product_attention(query[:, :, 4:5], value[:, :, :7], value[:, :, :7]).float()
    torch.testing.assert_close(got[:, :, 4:5], want, rtol=0.01, atol=0.01)


def test_a_query_that_sees_nothing_gives_zeros():
    query, key = values(1, 2, 40, 32), values(1, 2, 50, 32)
    mask = torch.ones(1, 1, 40, 50, dtype=torch.bool, device="cuda")
    mask[0, 0, 3] = False
    got = attend(query, key, key, mask)
    assert not got[:, :, 3].any() and got[:, :, 4].any() and got.isfinite().all()


def test_what_is_not_finite():
    x, y = values(40, 64), values(64, 50)
    x[3, 5], x[4, 6], y[7, 8] = float("nan"), float("inf"), -float("inf")
    got, want = matmul_bfloat16(x, y), x @ y
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())


def test_the_same_bits_in_ten_runs_and_in_a_captured_graph():
    x, y, query = values(300, 700), values(700, 200), values(2, 4, 300, 64)
    want = matmul_bfloat16(x, y), attend(query, query, query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = matmul_bfloat16(x, y), attend(query, query, query)
    for _ in range(9):
        graph.replay()
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("modes", [("fp8_e4m3", 16), ("fp8_e4m3", 32, "mse"), ("fp4_e2m1", 32, "floor", "half_away")])
def test_quantizations_that_the_kernel_has_not_take_two_steps(modes):
    query, key, value = values(2, 2, 40, 32), values(2, 2, 50, 32), values(2, 2, 50, 32)
    product = attend(query, key, value).transpose(1, 2)
    got = attend(query, key, value, None, False, None, None, *modes).transpose(1, 2)
    assert torch.equal(got, pt2mx.fake_quantize_mx(product, *modes[:2], -1, *modes[2:]))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_model(mode, dtype):
    def forward(self, x):
        q, k, v = self.up(x).view(2, 50, 3, 4, 32).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v) + torch.softmax(q @ k.mT, -1) @ v
        return self.down(y.transpose(1, 2).reshape(2, 50, 128))

    torch._dynamo.reset()
    config = get_default_mx_quantization_config("mxint8", "mxint8")
    quantizer = MXQuantizer().set_global(config)
    for product in ("aten.scaled_dot_product_attention", "aten.matmul"):
        quantizer = quantizer.set_operator_type(product, config)
    x = torch.randn(2, 50, 128, dtype=dtype)
    converted = convert(module_of(forward, up=nn.Linear(128, 384), down=nn.Linear(128, 128)).to(dtype), (x,), quantizer)
    model = pt2mx.lower_to_inductor(converted, "cuda")
    assert count(model, attention_bfloat16) == 1 and count(model, matmul_bfloat16) == 2 * (dtype == torch.float32)
    compiled = torch.compile(model, mode=mode)
    with torch.no_grad():
        for _ in range(3):
            got = compiled(x.cuda())
    assert got.dtype == dtype
    assert relative_error(got.cpu(), converted(x)) < 0.03  # values that are rounded the other way
