"""Every name of microxcaling's package that is offered, each with a call that asserts a value."""

import argparse
import importlib

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2mx
from pt2mx import microxcaling

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
    "ElemFormat": ("formats", lambda c: (c.from_str("FP4_E2M1"), c.fp4)),
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


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    module, call = NAMES[name]
    there = getattr(importlib.import_module(f"pt2mx.microxcaling.{module}"), name)
    assert getattr(microxcaling, name) is there
    got, want = call(there)
    assert torch.allclose(got, want, rtol=1e-6) if isinstance(want, torch.Tensor) else got == want


def test_the_table_is_whole():
    assert set(NAMES) == set(microxcaling.__all__)
