"""Calls of operators that repeat an earlier one."""

from types import SimpleNamespace

import pytest
import torch
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

import pt2mx
from pt2mx import MXError
from pt2mx.kernels.cpu import quantize as cpu_quantize
from pt2mx.kernels.cpu import repeated
from tests.threads import on_threads

ROWS = "fp8_e4m3", 32, "floor", "even"


def packed(*shape):
    scale, data = pt2mx.quantize_mx(torch.randn(shape), "mxfp4")
    return data, scale


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def calls():
    """An operator, its tensors, and its other arguments."""
    x, (data, scale) = torch.randn(3, 64), packed(32, 64)
    yield torch.ops.pt2mx.quantize_mx.default, (x,), ("fp8_e4m3", 32, -1, "floor", "even")
    yield torch.ops.pt2mx.fake_quantize_mx.default, (x,), ("fp8_e4m3", 32, 0, "floor", "even", None, "identity")
    yield torch.ops.pt2mx.dequantize_mx.default, (data, scale), ("fp4_e2m1", 32, torch.bfloat16, -1)
    yield torch.ops.pt2mx.linear_mx.default, (x, data, scale, torch.randn(32)), ("fp4_e2m1", 32, 32)
    yield torch.ops.pt2mx.linear_mx.default, (x, data, scale), (None, "fp4_e2m1", 32, 0)
    yield torch.ops.pt2mx.rotated_fake_quantize_mx.default, (x,), (32, *ROWS)
    yield torch.ops.pt2mx.rotated_fake_quantize_mx.default, (x,), (32, *ROWS, torch.bfloat16)
    yield torch.ops.pt2mx.activation_fake_quantize_mx.default, (x,), ("silu", *ROWS)


def kept():
    return sum(map(len, repeated._calls.values()))


@pytest.mark.parametrize("operator, tensors, options", list(calls()), ids=lambda part: getattr(part, "__name__", ""))
def test_it_has_the_bits_of_a_first_call(operator, tensors, options):
    results = []
    repeated.forget()
    for _ in range(2):
        results.append(operator(*tensors, *options))
    assert kept() == 1
    others = [tensor.roll(1, 0) for tensor in tensors]
    results.append(operator(*others, *options))
    repeated.forget()
    results.append(operator(*others, *options))
    for first, second in (results[:2], results[2:]):
        for a, b in zip(*([r] if isinstance(r, torch.Tensor) else r for r in (first, second)), strict=True):
            assert torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


def test_what_differs_is_checked_anew():
    x, (data, scale) = torch.randn(2, 64), packed(32, 64)
    torch.ops.pt2mx.linear_mx.default(x, data, scale, None, "fp4_e2m1", 32, 0)
    for change in (x[:, :32], x.double(), x.to("meta")):
        with pytest.raises(MXError):
            torch.ops.pt2mx.linear_mx.default(change, data, scale, None, "fp4_e2m1", 32, 0)
    with pytest.raises(MXError, match="unknown"):
        torch.ops.pt2mx.linear_mx.default(x, data, scale, None, "fp3", 32, 0)


def test_another_number_of_threads_is_another_call():
    x, weight = torch.randn(40, 64), packed(32, 64)
    repeated.forget()
    on_threads(lambda: torch.ops.pt2mx.linear_mx.default(x, *weight, None, "fp4_e2m1", 32, 0), 1, 2)
    assert len(repeated._calls.get("linear_mx", ())) in (0, 2)  # no matrix instructions: no kernel


def test_a_transformation_and_a_mode_see_the_operator():
    x, options = torch.randn(3, 64), (32, *ROWS)
    first = torch.ops.pt2mx.rotated_fake_quantize_mx.default(x, *options)
    assert repeated.run_again("rotated_fake_quantize_mx", (x, *options)) is not NotImplemented
    seen = []
    vmap(lambda row: (seen.append(repeated.run_again("rotated_fake_quantize_mx", (row, *options))), row)[1])(x[None])
    assert seen == [NotImplemented]
    with Operators() as mode:
        again = torch.ops.pt2mx.rotated_fake_quantize_mx.default(x, *options)
    assert torch.equal(again, first)
    assert mode.seen == [torch.ops.pt2mx.rotated_fake_quantize_mx.default]


@pytest.mark.parametrize("options", [{"rounding": "stochastic"}, {"seed": 3, "rounding": "stochastic"}])
def test_random_numbers_are_drawn_anew(options):
    x = torch.randn(64, 64)
    draws = [pt2mx.fake_quantize_mx(x, "mxfp4", **options) for _ in range(2)]
    assert torch.equal(*draws) == ("seed" in options)


def test_a_tensor_scale_is_read_anew():
    x = torch.randn(4, 64)
    scales = [torch.tensor(t) for t in (1.0, 0.5)]
    results = [pt2mx.fake_quantize_mx(x, "nvfp4", tensor_scale=t) for t in scales]
    repeated.forget()
    assert torch.equal(results[1], pt2mx.fake_quantize_mx(x, "nvfp4", tensor_scale=scales[1]))


def test_few_calls_are_kept():
    for number in range(repeated._MOST + 3):
        repeated.keep(SimpleNamespace(name="of_this_test", args=(number,)), lambda n: n)
    assert len(repeated._calls["of_this_test"]) <= repeated._MOST
    assert repeated.run_again("of_this_test", (repeated._MOST + 2,)) == repeated._MOST + 2
    assert repeated.run_again("of_this_test", (0,)) is NotImplemented


def test_order_in_memory_of_views():
    """A kernel sees such a tensor with its dimensions in another order."""
    x = torch.randn(4, 8, 64)
    for view in (x.permute(2, 0, 1), x.permute(1, 0, 2), x[:, :1], x[:, ::2]):
        first = pt2mx.quantize_mx(view, "mxfp4", axis=0)
        again = pt2mx.quantize_mx(view, "mxfp4", axis=0)
        want = pt2mx.quantize_mx(view.contiguous(), "mxfp4", axis=0)
        for a, b, c in zip(first, again, want, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c) and a.stride() == b.stride()


def test_the_numbers_of_a_spec_outlive_their_cache():
    x = torch.randn(2, 64)
    want = pt2mx.fake_quantize_mx(x, "mxfp6")
    cpu_quantize.spec_of.cache_clear()
    assert torch.equal(pt2mx.fake_quantize_mx(x, "mxfp6"), want)
