"""The table of kernels, and the rule that a definition runs where a kernel returns None."""

import importlib
import importlib.util

import pytest
import torch

from pt2mx import ELEMENTS, MXSpec
from pt2mx.kernels import reference_chunked, select
from pt2mx.kernels.cpu import quantize


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("operator", select.KERNELS)
def test_rows_name_operators_and_functions(operator):
    assert operator in select.STEPS or getattr(torch.ops.pt2mx, operator).default
    for device, name in select.KERNELS[operator].items():
        module, _, function = name.partition(":")
        assert device in ("any", "cpu", "cuda") and module.startswith("gpu.") == (device == "cuda")
        if device != "cuda" or importlib.util.find_spec("triton"):
            assert callable(getattr(importlib.import_module(f"pt2mx.kernels.{module}"), function))


def test_kernels_of_the_cpu_take_plain_dense_tensors_of_one_device():
    x, narrow = torch.ones(2, 32), MXSpec("mxfp4")
    assert select._device_of((x, narrow, None, 3)) == "cpu"
    assert select._device_of((torch.nn.Parameter(x), x)) == "cpu"
    for args in ((x.to("meta"),), (x, x.to("meta")), (x.to_sparse(),), (x, x.as_subclass(Subclass)), (narrow,)):
        assert select._device_of(args) is None


def test_kernels_take_elements_of_at_most_8_bits():
    for name, element in ELEMENTS.items():
        assert (select._device_of((torch.ones(32), MXSpec(name, 32, 0))) is None) == element.is_wide


def test_the_definition_runs_where_a_kernel_returns_none(monkeypatch):
    x, spec = torch.randn(2, 32), MXSpec("mxfp4", axis=1)
    want = reference_chunked.fake_quantize(x, spec, None)
    calls = []
    monkeypatch.setattr(quantize, "fake_quantize", lambda *args: calls.append(args))
    assert torch.equal(select.run_kernel("fake_quantize_mx", x, spec, None), want) and len(calls) == 1


def test_an_operator_without_a_definition_gives_none():
    assert select.run_kernel("matmul_bfloat16", torch.ones(2, 2), torch.ones(2, 2).to("meta")) is None
