"""Every public name of microxcaling's package: offered, each with a call that asserts a value, or refused by name."""

import argparse
import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2mx
from pt2mx import MXError, microxcaling

SPECS = {"w_elem_format": "fp8_e4m3", "a_elem_format": "fp8_e4m3", "round_mx_output": "even"}
X, W = torch.randn(2, 2, 20, generator=torch.Generator().manual_seed(0)).unbind(0)
QX, QW = (pt2mx.fake_quantize_mx(t, "mxfp8") for t in (X, W))
ONES = {n: torch.ones(1, 1, *(2,) * n) for n in (1, 2, 3)}


def layer_of_ones(cls, n: int) -> torch.Tensor:
    layer = cls(1, 1, 2, mx_specs=SPECS)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer(ONES[n]).sum().item()


def linear_layer(cls) -> torch.Tensor:
    layer = cls(20, 2, bias=False, mx_specs=SPECS)
    layer.weight.data = W.clone()
    return layer(X)


# (module of the name, what a call with it gives, what it must be)
NAMES = {
    "MxSpecs": ("specs", lambda c: (c()["round"], "nearest")),
    "add_mx_args": ("specs", lambda f: (f(argparse.ArgumentParser()).parse_args([]).skip_early_exit, False)),
    "finalize_mx_specs": ("specs", lambda f: (f({"w_elem_format": "int8"})["w_elem_format_bp"], "int8")),
    "get_mx_specs": ("specs", lambda f: (f(argparse.Namespace(bfloat=16))["bfloat"], 16)),
    "get_backwards_mx_specs": (
        "specs",
        lambda f: (f(microxcaling.MxSpecs(bfloat=16, quantize_backprop=False))["bfloat"], 0),
    ),
    "get_default_mx_specs": ("specs", lambda f: (f()["block_size"], 0)),
    "apply_mx_specs": ("specs", lambda f: (f({"block_size": 4})["block_size"], 4)),
    "mx_assert_test": ("specs", lambda f: (f({}), None)),
    "ElemFormat": ("formats", lambda c: (c.from_str("FP4_E2M1"), c.fp4)),
    "RoundingMode": ("formats", lambda c: (c["even"].value, 2)),
    "quantize_mx_op": ("mx_ops", lambda f: (f(X, SPECS, "fp8_e4m3", 32, [-1], "even"), QX)),
    "quantize_elemwise_op": ("elemwise_ops", lambda f: (f(X, {"bfloat": 16}, "even"), X.bfloat16().float())),
    "quantize_bfloat": ("quantize", lambda f: (f(X, {"bfloat": 16, "round": "even"}), X.bfloat16().float())),
    "Linear": ("linear", lambda c: (linear_layer(c), functional.linear(QX, QW))),
    "linear": ("linear", lambda f: (f(X, W, mx_specs=SPECS), functional.linear(QX, QW))),
    "matmul": ("matmul", lambda f: (f(X, W.T, mx_specs=SPECS), QX @ QW.T)),
    "bmm": ("bmm", lambda f: (f(X[None], W.T[None], SPECS), (QX @ QW.T)[None])),
    **{f"Conv{n}d": ("convolution", lambda c, n=n: (layer_of_ones(c, n), 2.0**n)) for n in (1, 2, 3)},
    **{
        f"conv{n}d": ("convolution", lambda f, n=n: (f(ONES[n], ONES[n], mx_specs=SPECS).item(), 2.0**n))
        for n in (1, 2, 3)
    },
    "ConvTranspose2d": ("transpose_convolution", lambda c: (layer_of_ones(c, 2), 16.0)),
}
#: further exports of `mx/__init__.py` of microxcaling, and the imports of its example
REFUSED = """
    LSTM sigmoid tanh relu relu6 leaky_relu silu gelu Sigmoid Tanh ReLU ReLU6 LeakyReLU SiLU GELU adaptive_avg_pool2d
    AdaptiveAvgPool2d BatchNorm1d BatchNorm2d BatchNorm3d LayerNorm RMSNorm layer_norm GroupNorm simd_add simd_sub
    simd_mul simd_div simd_split simd_sqrt simd_square simd_exp simd_log simd_reduce_sum simd_reduce_mean simd_norm
    Softmax softmax mx_mapping
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    module, call = NAMES[name]
    there = getattr(importlib.import_module(f"pt2mx.microxcaling.{module}"), name)
    assert getattr(microxcaling, name) is there
    got, want = call(there)
    assert torch.allclose(got, want, rtol=1e-6) if isinstance(want, torch.Tensor) else got == want


def test_the_table_is_whole():
    assert set(NAMES) == set(microxcaling.__all__) and set(REFUSED) == set(microxcaling.NOT_OFFERED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_out_is_refused_by_name(name):
    with pytest.raises(MXError, match=rf"pt2mx\.microxcaling has no {name}: it (computes|patches)"):
        exec(f"from pt2mx.microxcaling import {name}")
    with pytest.raises(ImportError, match="cannot import name 'others'"):
        exec("from pt2mx.microxcaling import others")


def test_a_name_that_is_not_offered_gives_its_reason_however_the_package_was_reached(run_python):
    for first in ("", "from pt2mx import microxcaling", "import pt2mx; pt2mx.microxcaling"):
        code = f"{first}\ntry:\n    from pt2mx.microxcaling import tanh\nexcept ValueError as error:\n    print(error)"
        assert "pt2mx.microxcaling has no tanh" in run_python(code)
