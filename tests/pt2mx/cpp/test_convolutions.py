"""Convolutions of the C++ library in a process without pt2mx, compared with Python's to the bit."""

import pytest
import torch

from tests.pt2mx.cpp.calls import check, ours, packed

pytestmark = pytest.mark.compiled  # the library takes half a minute to build

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_convolutions(dtype, tmp_path):
    """By every kernel, and by torch."""
    torch.manual_seed(0)
    calls = []
    for element, block in (("int8", 32), ("fp8_e4m3", 64), ("fp6_e2m3", 32), ("fp4_e2m1", 16)):
        x = ours.fake_quantize_mx(torch.randn(2, 9, 8, 50), element, 32, -1, "floor", "even", None, "identity").to(
            dtype
        )
        for kernel, conv_args in (((3, 3), ([1, 2], [1, 1], [1, 1])), ((1, 1), ([2, 2], [0, 0], [1, 1]))):
            scale, data = packed((40, *kernel, 50), element, block)
            bias = torch.randn(40)
            calls.append(("conv2d_mx", (x, data, scale, bias, element, block, *conv_args, torch.float32)))
            calls.append(("conv2d_mx", (x, data, scale, None, element, block, *conv_args, None)))
        image = x[..., :3].contiguous()
        scale, data = packed((40, 5, 5, 3), element, block)
        calls.append(("conv2d_mx", (image, data, scale, bias, element, block, [2, 2], [2, 2], [1, 1], torch.float32)))
    check(calls, tmp_path)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_quantized_convolutions(dtype, tmp_path):
    """By one kernel, and in two steps."""
    torch.manual_seed(0)
    calls = []
    for element in ("int8", "fp8_e4m3", "fp4_e2m1"):
        x = ours.fake_quantize_mx(torch.randn(2, 9, 8, 64), element, 32, -1, "floor", "even", None, "identity").to(
            dtype
        )
        for n, block, kernel, conv_args in (
            (64, 32, (3, 3), ([1, 2], [1, 1], [1, 1])),
            (40, 16, (1, 1), ([2, 2], [0, 0], [1, 1])),
        ):
            scale, data = packed((n, *kernel, 64), element, 32)
            convolved = ours.conv2d_mx(x, data, scale, None, element, 32, *conv_args, torch.float32)
            for activation, keep in (
                ("relu", True),
                ("gelu_tanh", False),
                ("gelu", True),
                ("silu", True),
                ("none", True),
            ):
                options = activation, keep, element, block
                args = (x, data, scale, torch.randn(n), element, 32, *conv_args, torch.float32)
                calls.append(("conv2d_fake_quantize_mx", (*args, None, *options, "floor", "even", torch.bfloat16)))
                calls.append(
                    ("conv2d_fake_quantize_mx", (*args, torch.randn_like(convolved), *options, "floor", "even"))
                )
                calls.append(("conv2d_fake_quantize_mx", (*args, convolved.bfloat16(), *options, "ceil", "half_away")))
    check(calls, tmp_path)
