"""Prepared calls of the C++ kernels give the bits of the operators."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from pt2mx import MXError, ops
from pt2mx.kernels.cpu import prepared
from pt2mx.kernels.cpu.prepared import (
    PreparedActivation,
    PreparedAttention,
    PreparedDecodingAttention,
    PreparedLinear,
)
from pt2mx.ops.activations import activation_fake_quantize_mx
from pt2mx.ops.attention import attention_mx
from pt2mx.ops.decoding import decoding_attention
from pt2mx.ops.linear import linear_mx
from tests.cpu_kernels import DTYPES
from tests.threads import on_threads


def packed(n: int, k: int, element: str, block: int = 32) -> tuple[Tensor, Tensor]:
    scale, data = ops.quantize_mx(torch.randn(n, k), element, block, -1, "floor", "even")
    return data, scale


def prepared_result(x: Tensor, weight: tuple[Tensor, Tensor], bias: Tensor | None, *options: object) -> Tensor:
    dtype = x.dtype if bias is None else bias.dtype
    out = torch.empty((*x.shape[:-1], len(weight[0])), dtype=dtype)
    PreparedLinear(*shapes(x, *weight), x.dtype, dtype, *options)(x, *weight, bias, out=out)
    return out


def shapes(*tensors: Tensor) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in tensors]


@pytest.mark.parametrize("element", ["fp4_e2m1", "fp6_e3m2", "fp8_e4m3", "int8"])
def test_bits_of_the_operator(element):
    for i, (rows, k, block) in enumerate(((1, 96, 32), (1, 160, 64), (3, 70, 7), (4, 64, 32), (9, 128, 32))):
        weight = packed(37, k, element, block)
        for dtype in DTYPES:
            bias = torch.randn(37).to(DTYPES[i % 3]) if i % 2 else None
            for x in (
                torch.randn(rows, k),
                torch.randint(-60, 60, (1, rows, k)) / 16,
            ):  # floats, and integers of 8 bits
                x, out_dtype = x.to(dtype), None if bias is None else bias.dtype
                expected = linear_mx(x, *weight, bias, element, block, 0, out_dtype)
                assert torch.equal(prepared_result(x, weight, bias, element, block, 0), expected)


def test_rotation():
    x, weight = torch.randn(2, 64), packed(33, 64, "fp4_e2m1")
    result = prepared_result(x, weight, None, "fp4_e2m1", 32, 32)
    assert torch.equal(result, linear_mx(x, *weight, None, "fp4_e2m1", 32, 32))


def test_which_calls_are_supported():
    def supports(rows: int, rotation: int) -> bool:
        x, data, scale = (rows, 64), (8, 32), (8, 2)
        return PreparedLinear(x, data, scale, torch.float32, torch.float32, "fp4_e2m1", 32, rotation).is_supported

    cases = {(0, 0): False, (1, 0): True, (32, 0): True, (33, 0): False, (4, 32): True, (5, 32): False}
    assert {case: supports(*case) for case in cases} == cases


def test_values_that_the_kernels_leave_to_the_definition():
    """Matrix instructions would take these products for zero."""
    x, weight = torch.full((8, 64), 2.0**-120).bfloat16(), packed(32, 64, "fp8_e5m2")
    weight[1].fill_(10)
    assert torch.equal(
        prepared_result(x, weight, None, "fp8_e5m2", 32, 0), linear_mx(x, *weight, None, "fp8_e5m2", 32, 0)
    )


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(activation, dtype):
    for element, shape, block in (("int8", (1, 1, 96), 32), ("fp4_e2m1", (3, 70), 7), ("fp8_e4m3", (64,), 64)):
        x, out = torch.randn(shape).to(dtype), torch.empty(shape)
        options = activation, element, block, "even", "even"
        PreparedActivation(shape, dtype, out.dtype, *options)(x, out=out)
        assert torch.equal(out, activation_fake_quantize_mx(x, *options, out.dtype))
    assert not PreparedActivation((0, 32), dtype, dtype, *options).is_supported


def of_one_slot(query: Tensor, *cache: Tensor) -> list[tuple[int, ...]]:
    return [tuple(query.shape), *((*one.shape[:2], 1, *one.shape[3:]) for one in cache)]


def cache_of(heads: int, slots: int, width: int, element: str) -> list[Tensor]:
    return [
        t
        for _ in range(2)
        for t in reversed(ops.quantize_mx(torch.randn(1, heads, slots, width), element, 32, -1, "floor", "even"))
    ]


@pytest.mark.parametrize("element", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(element, dtype):
    query, cache = torch.randn(1, 6, 1, 64).to(dtype), cache_of(2, 40, 64, element)
    for mask, scale in ((None, None), (torch.rand(1, 1, 1, 40) < 0.7, 0.2)):
        options, of_mask = (element, 32, 64), None if mask is None else (1, 1, 1, 1)
        call = PreparedAttention(*of_one_slot(query, *cache), of_mask, dtype, *options, scale)
        call(query, *cache, mask, out=(out := torch.empty_like(query)))
        assert call.is_supported and torch.equal(out, attention_mx(query, *cache, *options, mask, scale))
        longer = [torch.cat([one] * 2, 2) for one in cache]
        longer_mask = None if mask is None else mask.repeat(1, 1, 1, 2)
        call(query, *longer, longer_mask, out=out)
        assert torch.equal(out, attention_mx(query, *longer, *options, longer_mask, scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_attention(dtype):
    """One object takes any number of slots, and masks of a sequence or of a head."""
    query = torch.randn(3, 6, 1, 64).to(dtype)
    for of_mask, scale in ((None, None), ((3, 1, 1), 0.2), ((3, 6, 1), 0.2), ((1, 1, 1), None)):
        call = PreparedDecodingAttention(
            (3, 6, 1, 64), (3, 2, 1, 64), (3, 2, 1, 32), None if of_mask is None else (*of_mask, 1), dtype, scale
        )
        for slots in (1, 40, 77):
            keys, values = torch.randn(3, 2, slots, 64).to(dtype), torch.randn(3, 2, slots, 32).to(dtype)
            mask = None if of_mask is None else torch.rand(*of_mask, slots) < 0.7
            out = torch.empty(3, 6, 1, 32, dtype=dtype)
            call(query, keys, values, *([] if mask is None else [mask]), out=out)
            assert call.is_supported and torch.equal(out, decoding_attention(query, keys, values, mask, scale, None))
    assert not PreparedDecodingAttention((1, 1, 1, 48), (1, 1, 1, 48), (1, 1, 1, 48), None, dtype, None).is_supported


def test_tensors_of_other_slots():
    """Compiled code does not compare unknown sizes."""
    query, keys = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 8, 32)
    call = PreparedDecodingAttention((1, 2, 1, 32), (1, 2, 1, 32), (1, 2, 1, 32), (1, 1, 1, 1), query.dtype, None)
    for values, slots in ((keys[:, :, :7], 8), (keys, 9)):
        with pytest.raises(MXError, match=r"values|broadcast"):
            call(query, keys, values, torch.ones(1, 1, 1, slots, dtype=torch.bool), out=torch.empty_like(query))


def test_attention_over_codes_that_are_no_numbers():
    query, cache = torch.randn(1, 2, 1, 64), cache_of(2, 8, 64, "fp8_e4m3")
    cache[0][0, 0, 0, 0] = 0x7F
    call = PreparedAttention(*of_one_slot(query, *cache), None, query.dtype, "fp8_e4m3", 32, 64, None)
    call(query, *cache, out=(out := torch.empty_like(query)))
    expected = attention_mx(query, *cache, "fp8_e4m3", 32, 64)
    assert torch.equal(out.isnan(), expected.isnan()) and out[0, 0].isnan().all() and not out[0, 1].isnan().any()


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(prepared, "is_available", lambda: False)
    x, weight, cache = torch.randn(2, 64), packed(33, 64, "int8"), cache_of(2, 8, 32, "int8")
    assert torch.equal(prepared_result(x, weight, None, "int8", 32, 0), linear_mx(x, *weight, None, "int8", 32, 0))
    options = "none", "int8", 32, "even", "even"
    PreparedActivation((2, 64), x.dtype, x.dtype, *options)(x, out=(out := torch.empty_like(x)))
    assert torch.equal(out, activation_fake_quantize_mx(x, *options))
    query = torch.randn(1, 2, 1, 32)
    call = PreparedAttention(*of_one_slot(query, *cache), None, query.dtype, "int8", 32, 32, None)
    call(query, *cache, out=(out := torch.empty_like(query)))
    assert torch.equal(out, attention_mx(query, *cache, "int8", 32, 32))


def test_another_number_of_threads_and_threads_of_the_caller():
    xs, weight = torch.randn(8, 16, 256).bfloat16(), packed(512, 256, "fp4_e2m1")
    expected = [linear_mx(x, *weight, None, "fp4_e2m1", 32, 0) for x in xs]
    call = PreparedLinear((16, 256), *shapes(*weight), xs.dtype, xs.dtype, "fp4_e2m1", 32, 0)

    def run(i: int) -> Tensor:
        out = torch.empty(16, 512, dtype=xs.dtype)
        call(xs[i], *weight, out=out)
        return out

    def check() -> None:
        assert all(map(torch.equal, map(run, range(8)), expected))
        with ThreadPoolExecutor(4) as pool:
            assert all(map(torch.equal, pool.map(run, [*range(8)] * 8), expected * 8))

    on_threads(check, 1, 3)
