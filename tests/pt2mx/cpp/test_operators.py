"""The operators of the C++ library in a process without pt2mx, compared with Python's to the bit."""

import re

import pytest
import torch

import pt2mx
from pt2mx import MXSpec, cpp
from pt2mx.cpp import tables
from pt2mx.ops.contract import schema_of
from tests.attention import NOT_QUANTIZED
from tests.fresh_process import run_program
from tests.oracle import modes_of
from tests.pt2mx.cpp.calls import check, ours, packed, run_calls

pytestmark = pytest.mark.compiled  # the library takes half a minute to build

_ELEMENTS = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8", "fp5_e2m2", "int4", "int3_full")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_the_schemas_are_those_of_python():
    for path, text in tables.files().items():
        assert path.read_text() == text, "run python -m pt2mx.cpp.tables"
    text = "".join(line.strip() for line in (tables.SOURCES / "schemas.inc").read_text().splitlines())
    text = text.replace('""', "").replace("\\", "")
    for name in tables.OPERATORS:
        assert str(schema_of(name)).removeprefix("pt2mx::") in text


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_matmuls(dtype, tmp_path):
    torch.manual_seed(0)
    calls = []
    for element in _ELEMENTS:
        for rows, n, k, block, rotation in (
            ((), 5, 64, 32, 0),
            ((1,), 33, 100, 32, 0),
            ((3,), 64, 96, 16, 32),
            ((2, 3), 70, 64, 64, 64),
            ((40,), 32, 128, 32, 0),
            ((70,), 260, 64, 8, 16),
            ((0,), 4, 32, 32, 0),
        ):
            scale, data = packed((n, k), element, block)
            x = torch.randn(*rows, k).to(dtype)
            bias = None if n % 2 else torch.randn(n).to(dtype)
            calls.append(("linear_mx", (x, data, scale, bias, element, block, rotation)))
    x = torch.randn(300, 64).to(dtype).t().contiguous().t()  # not contiguous, more than a panel of rows
    scale, data = packed((48, 64), "fp4_e2m1", 32)
    calls.append(("linear_mx", (x, data, scale, None, "fp4_e2m1", 32, 0)))
    scale, data = packed((3, 16, 64), "fp8_e4m3", 32)
    offs = torch.tensor([2, 2, 40], dtype=torch.int32)
    for x in (torch.randn(41, 64), torch.randn(41, 64).bfloat16(), torch.randn(64, 41).bfloat16().t()):
        for target_dtype in ((), (torch.float32,)):
            calls.append(("grouped_linear_mx", (x.to(dtype), data, scale, offs, "fp8_e4m3", 32, *target_dtype)))
    check(calls, tmp_path)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_matmuls_of_many_rows(dtype, tmp_path):
    """By matrix instructions, if x is in bfloat16; results in its dtype and in float32."""
    torch.manual_seed(0)
    calls = []
    for element in _ELEMENTS:
        for rows, n, k in ((65, 37, 64), (130, 96, 1100)):
            scale, data = packed((n, k), element, 32)
            x = torch.randn(rows, k).to(dtype)
            calls.append(("linear_mx", (x, data, scale, torch.randn(n), element, 32, 0, torch.float32)))
            calls.append(("linear_mx", (x, data, scale, None, element, 32, 0, None)))
    calls.append(("linear_mx", (x * 2.0**-120, data, scale, None, element, 32, 0, torch.float32)))
    for element in ("int8", "fp4_e2m1", "fp6_e2m3"):  # as integers, where x is of such an element too
        scale, data = pt2mx.quantize_mx(torch.randn(37, 100), MXSpec(element, 32))
        for rows in (7, 65):
            x = ours.fake_quantize_mx(torch.randn(rows, 100), element, 32, -1, "floor", "even", None, "identity").to(
                dtype
            )
            calls.append(("linear_mx", (x, data, scale, None, element, 32, 0, torch.float32)))
    check(calls, tmp_path)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_attention(dtype, tmp_path):
    torch.manual_seed(0)
    calls = []
    for element, block in (("fp8_e4m3", 32), ("fp4_e2m1", 16), ("int8", 64), ("fp6_e2m3", 32)):
        for heads, key_heads, queries, slots, width, value_width in (
            (4, 2, 1, 9, 64, 32),
            (4, 4, 3, 20, 32, 64),
            (2, 1, 40, 17, 64, 64),
            (2, 2, 2, 5, 40, 40),
            (2, 2, 2, 0, 32, 32),
        ):
            key_scale, key = packed((2, key_heads, slots, width), element, block)
            value_scale, value = packed((2, key_heads, slots, value_width), element, block)
            query = torch.randn(2, heads, queries, width).to(dtype)
            for mask in (None, torch.rand(1, 1, queries, slots) < 0.7, torch.rand(2, heads, queries, slots) < 0.5):
                args = (query, key, key_scale, value, value_scale, element, block, value_width, mask, None)
                calls.append(("attention_mx", args))
            calls.append(("attention_mx", (*args[:-2], None, 0.3)))
    check(calls, tmp_path)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_matmuls_of_activations(dtype, tmp_path):
    """By matrix instructions, and by torch: few rows, values that bfloat16 does not represent, other dtypes."""
    torch.manual_seed(0)

    def values(*shape):
        return torch.randn(shape).bfloat16().to(dtype)

    calls = []
    for shape in ((40, 33), (5, 33), (3, 40, 64), (2, 3, 40, 33), (2, 1, 3, 20, 64), (2, 3, 0, 33)):
        columns = values(*shape[:-2], shape[-1], 50)
        calls += [
            ("matmul_bfloat16", (values(*shape), y, target))
            for y, target in ((columns, None), (columns.mT.contiguous().mT, torch.float32))
        ]
    calls.append(("matmul_bfloat16", (values(40, 66)[:, ::2], values(33, 100)[:, ::2], None)))
    calls.append(("matmul_bfloat16", (torch.randn(40, 64).to(dtype), values(64, 32), None)))
    for heads, key_heads, queries, keys, width, value_width in ((4, 2, 40, 50, 64, 20), (2, 2, 5, 7, 32, 32)):
        query = values(2, queries, heads, width).transpose(1, 2)
        key, value = values(2, key_heads, keys, width), values(2, key_heads, keys, value_width)
        masks = (
            torch.rand(queries, keys) < 0.7,
            torch.rand(2, 1, 1, keys) < 0.7,
            torch.randn(heads, queries, 1).to(dtype),
        )
        calls += [
            ("attention_bfloat16", (query, key, value, mask, False, None, None, *NOT_QUANTIZED))
            for mask in (None, *masks)
        ]
        for target in (torch.float32, torch.bfloat16):
            calls.append(("attention_bfloat16", (query, key, value, None, True, 0.3, target, *NOT_QUANTIZED)))
        calls.append(
            ("attention_bfloat16", (torch.randn_like(query), key, value, None, False, None, None, *NOT_QUANTIZED))
        )
        quantization = "fp6_e2m3", 32, "even", "even"
        for out_dtype in (None, torch.bfloat16):
            calls.append(("attention_bfloat16", (query, key, value, None, False, None, None, *quantization, out_dtype)))
        few = query[:, :, :3], key, value
        calls += [("attention_bfloat16", (*few, torch.arange(keys) % 3 > 0, False, None, None, *NOT_QUANTIZED))]
    check(calls, tmp_path)


#: as above, for calls that are refused
_REFUSED = """
import sys, torch
torch.ops.load_library(sys.argv[1])
x = torch.randn(2, 2, 20, 32).bfloat16().float()
attention, matmul = torch.ops.pt2mx.attention_bfloat16, torch.ops.pt2mx.matmul_bfloat16
masks = torch.zeros(3, 20), torch.ones(3, 1, 20, 20).bool(), torch.zeros(20, 20).bfloat16(), torch.ones(20).int()
options = False, None, None, None, 32, "floor", "even"
calls = [lambda mask=mask: attention(x, x, x, mask, *options) for mask in masks]
operands = (x.double(), x.double(), x.double()), (x, x.bfloat16(), x)
calls += [lambda tensors=tensors: attention(*tensors, None, *options) for tensors in operands]
calls += [lambda: matmul(x.double(), x.mT.double()), lambda: matmul(x.int(), x.mT.int())]
for call in calls:
    try:
        print("returned", call().shape)
    except RuntimeError:
        print("refused")
"""


def test_matmuls_of_activations_that_do_not_fit(run_python):
    assert run_python(_REFUSED, [str(cpp.library_path())]).split() == ["refused"] * 8


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_rotations(dtype, tmp_path):
    torch.manual_seed(0)
    calls = [
        ("hadamard", (torch.randn(shape).to(dtype), size, axis))
        for shape, size, axis in (((3, 64), 32, -1), ((2, 128, 5), 64, 1), ((256,), 1, 0), ((0, 8), 8, -1))
    ]
    for element in _ELEMENTS:
        for scale_mode in modes_of(element):
            for rounding in set(pt2mx.modes.ROUNDINGS) - {"stochastic"}:
                x = torch.randn(4, 96).to(dtype)
                calls.append(("rotated_fake_quantize_mx", (x, 32, element, 20, scale_mode, rounding)))
        for size in (1, 32):
            args = (x, size, element, 20, "floor", "even", torch.bfloat16)
            calls.append(("rotated_fake_quantize_mx", args))
    calls.append(("random_bits", (torch.tensor(2**62 + 5), [3, 1000])))
    check(calls, tmp_path)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_quantized_activations(dtype, tmp_path):
    torch.manual_seed(0)
    calls = []
    for i, element in enumerate(_ELEMENTS):
        x, weight = torch.randn(6, 4, 70).to(dtype), torch.randn(2, 70)
        quantization = (element, (32, 20)[i % 2], ("floor", "ceil", "mse")[i % 3], ("even", "half_away")[i % 2])
        for activation in ("none", "gelu", "gelu_tanh", "silu", "relu"):
            calls.append(("activation_fake_quantize_mx", (x, activation, *quantization)))
        calls.append(("activation_fake_quantize_mx", (x.permute(1, 2, 0), "gelu", element, 32, "floor", "even", dtype)))
        for residual, of_norm in ((None, (None, None)), (x.flip(0), tuple(weight if i % 2 else weight.to(dtype)))):
            args = (x, residual, *of_norm, 1e-5, *quantization, torch.bfloat16)
            calls.append(("layer_norm_fake_quantize_mx", args))
    calls.append(("layer_norm_fake_quantize_mx", (x[:0], None, None, None, 1e-5, *quantization)))
    calls.append(("activation_fake_quantize_mx", (x[0, 0, 0], "silu", *quantization)))
    check(calls, tmp_path)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_quantized_matmuls(dtype, tmp_path):
    """By one kernel, and in two steps."""
    torch.manual_seed(0)
    calls = []
    for element in ("int8", "fp8_e4m3", "fp4_e2m1"):
        for rows, n, block in ((70, 64, 32), (70, 40, 32), (7, 64, 32), (70, 64, 16), (0, 64, 32)):
            scale, data = packed((n, 96), element, 32)
            x = ours.fake_quantize_mx(torch.randn(rows, 96), element, 32, -1, "floor", "even", None, "identity").to(
                dtype
            )
            for activation, rounding in (("gelu", "even"), ("none", "half_away")):
                quantization = activation, element, block, "floor", rounding
                bias = torch.randn(n)
                args = (x, data, scale, bias, element, 32, torch.float32, *quantization, torch.bfloat16)
                calls.append(("linear_fake_quantize_mx", args))
                calls.append(
                    ("linear_fake_quantize_mx", (x, data, scale, None, element, 32, None, *quantization, None))
                )
    check(calls, tmp_path)


def test_python_s_operators_stay_where_they_are(tmp_path):
    """In a process that has imported pt2mx the library registers nothing, and says nothing."""
    code = f"""
import torch, pt2mx
scale, data = pt2mx.quantize_mx(torch.ones(8, 64), pt2mx.MXSpec("fp4_e2m1"))
before = torch._C._dispatch_dump("pt2mx::linear_mx")
torch.ops.load_library({str(cpp.library_path())!r})
assert torch._C._dispatch_dump("pt2mx::linear_mx") == before
assert (torch.ops.pt2mx.linear_mx(torch.ones(2, 64), data, scale, None, "fp4_e2m1", 32, 0) == 64).all()
"""
    result = run_program(code, "-c", tmp_path)
    assert (result.status, result.err) == (0, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.ones(2, 96)}, "96 codes of fp4_e2m1 do not take 32 bytes"),
        ({0: torch.ones(2, 64, dtype=torch.float64)}, "float32, float16 or bfloat16"),
        ({2: torch.ones(8, 3, dtype=torch.uint8)}, "scales do not fit"),
        ({3: torch.ones(7)}, "bias does not fit"),
        ({4: "fp16_e5m10"}, "unknown element of pt2mx's C\\+\\+ operators: fp16_e5m10"),
        ({6: 48}, "blocks of 48 do not rotate 64"),
        ({8: "e4m3"}, "takes E8M0 scales of one row, not e4m3 of 1 rows"),
        ({9: 2}, "takes E8M0 scales of one row, not e8m0 of 2 rows"),
    ],
)
def test_bad_arguments_are_errors(change, message, tmp_path):
    scale, data = packed((8, 64), "fp4_e2m1", 32)
    args = [torch.ones(5, 64), data, scale, None, "fp4_e2m1", 32, 0, None, None, None, None]
    for position, value in change.items():
        args[position] = value
    result = run_calls([("linear_mx", args)], tmp_path)
    assert result.status == 1 and re.search(message, result.err)


def test_a_scale_mode_of_another_element_is_an_error(tmp_path):
    args = torch.ones(2, 64), 32, "int8", 32, "rceil_v2", "even"
    result = run_calls([("rotated_fake_quantize_mx", args)], tmp_path)
    assert result.status == 1 and "scale mode rceil_v2 is not defined for int8" in result.err
