"""linear_fake_quantize_mx on each instruction set, against a matmul and a quantization in two steps."""

import pytest
import torch

from pt2mx import MXSpec, ops
from pt2mx.kernels.cpu import activations, linear
from tests.cpu_kernels import packed
from tests.kernel_calls import ByArguments, selected
from tests.threads import on_threads

ISAS = {"amx": linear.AMX, "int8": linear.INT8, "bf16": linear.AVX512_BF16}
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    """Return the name of an instruction set, and let the kernels use only that one, if the machine has it."""
    isa_for = linear.isa_for
    monkeypatch.setattr(linear, "isa_for", lambda spec, k: isa_for(spec, k) & ISAS[request.param])
    return request.param


def quantized(rows, k, name):
    return ops.fake_quantize_mx(torch.randn(rows, k), name, 32, -1, "floor", "even", None, "identity").bfloat16()


def check(x, weight, bias, product_dtype, activation, quantization, dtype):
    """Return the result of the kernel, checked against two steps, or None if it declined."""
    data, scale, spec = weight
    got = ByArguments(linear).linear_fake_quantize(
        x, data, scale, bias, spec, product_dtype, activation, quantization, dtype
    )
    matmul = selected.linear(x, data, scale, bias, spec, 0, product_dtype)
    want = ByArguments(activations).activation_fake_quantize(matmul, activation, quantization, dtype)
    if got is not None:
        assert got.dtype == dtype and got.is_contiguous() and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    return got


@pytest.mark.diagonal
@pytest.mark.parametrize("product_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["int8", "fp6_e2m3", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "fp6_e3m2"])
def test_two_steps_to_the_bit(isa, name, product_dtype):
    torch.manual_seed(0)
    supported = linear.isa_for(MXSpec(name, 32), 96) != 0
    for rows, n, k in ((33, 32, 96), (50, 96, 70), (131, 160, 416)):
        for activation in ("none", "gelu", "gelu_tanh", "silu", "relu"):
            scale_mode = "ceil" if activation == "silu" else "floor"
            quantization, dtype = MXSpec(name, 32, -1, scale_mode), DTYPES[activation == "gelu"]
            bias = torch.randn(n).to(product_dtype) if activation != "relu" else None
            x, weight = quantized(rows, k, name), packed(n, k, name)
            got = check(x, weight, bias, product_dtype, activation, quantization, dtype)
            assert (got is not None) == supported


def test_other_elements_of_the_result_and_any_values(isa):
    """A NaN, an Inf, subnormal values and a block of zeros, through a weight of one value a row."""
    torch.manual_seed(0)
    x = quantized(40, 64, "int8")
    data, scale, spec = packed(64, 64, "int8")
    bias = torch.randn(64)
    bias[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    bias[32:] = 2.0**-140
    for name in ("fp4_e2m1", "fp8_e5m2", "int8_full", "fp6_e3m2"):
        for activation in ("none", "gelu", "relu"):
            for dtype in (*DTYPES, torch.float16):
                check(x * 0, (data, scale, spec), bias, torch.float32, activation, MXSpec(name, 32), dtype)
                check(x, (data, scale, spec), bias, torch.float32, activation, MXSpec(name, 32), dtype)


@pytest.mark.parametrize(
    ("n", "product_dtype", "quantization"),
    [
        (72, torch.float32, MXSpec("int8", 32)),
        (64, torch.float16, MXSpec("int8", 32)),
        (64, torch.float32, MXSpec("int8", 16)),
        (64, torch.float32, MXSpec("int8", 64)),
        (64, torch.float32, MXSpec("int8", 32, -1, "mse")),
        (64, torch.float32, MXSpec("int12", 32)),
        (64, torch.float32, MXSpec("int8", 32, -1, "floor", "half_away")),
    ],
)
def test_declined(isa, n, product_dtype, quantization):
    bias = torch.randn(n).to(product_dtype)
    x, weight = quantized(40, 64, "int8"), packed(n, 64, "int8")
    assert check(x, weight, bias, product_dtype, "gelu", quantization, torch.bfloat16) is None


def test_a_result_of_one_block(isa):
    got = check(
        quantized(40, 64, "int8"), packed(32, 64, "int8"), None, torch.float32, "none", MXSpec("int8", 64), DTYPES[0]
    )
    assert (got is not None) == bool(linear.isa_for(MXSpec("int8", 32), 64))


@pytest.mark.parametrize(("rows", "n"), [(0, 64), (1, 64), (32, 64), (40, 0)])
def test_unsupported_sizes(isa, rows, n):
    assert (
        check(
            quantized(rows, 64, "int8"),
            packed(n, 64, "int8"),
            None,
            torch.float32,
            "gelu",
            MXSpec("int8", 32),
            DTYPES[0],
        )
        is None
    )


def test_threads_and_strides_do_not_change_bits():
    torch.manual_seed(0)
    x = quantized(2 * 70, 96, "int8").view(70, 2, 96).transpose(0, 1)
    data, scale, spec = packed(64, 96, "int8")
    args = data.t().contiguous().t(), scale, None, spec, torch.float32, "gelu", MXSpec("int8", 32), torch.bfloat16
    results = on_threads(lambda: ByArguments(linear).linear_fake_quantize(x, *args), 1, 2, 3)
    assert all(f is None for f in results) or all(torch.equal(f, results[0]) for f in results)
