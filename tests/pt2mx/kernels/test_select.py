"""The table of kernels, and the rule that a definition runs where a kernel returns None."""

import importlib.util

import pytest
import torch

from pt2mx import ELEMENTS, MXSpec
from pt2mx.kernels import reference_chunked, select
from pt2mx.kernels.cpu import quantize
from pt2mx.ops.contract import OPERATORS
from pt2mx.ops.operator import Operator
from tests.kernel_calls import selected

#: computed without a kernel
NO_KERNELS = (
    *("tensor_scale_mx", "swizzle_scale"),
    *("linear_accumulated", "convolution_accumulated", "attention_accumulated"),
)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("operator", select.KERNELS)
def test_rows_name_operators_and_functions(operator):
    assert getattr(torch.ops.pt2mx, operator).default
    for device, kernel in select.KERNELS[operator].items():
        module, _, _ = kernel.function.partition(":")
        assert module.startswith({"cpu": "cpu.", "cuda": "gpu."}[device])
        if device != "cuda" or importlib.util.find_spec("triton"):
            assert callable(select._function(kernel.function))


@pytest.mark.parametrize("step", select.STEPS)
def test_steps_name_functions(step):
    definition, kernels = select.STEPS[step]
    assert all(callable(select._function(name)) for name in (definition, kernels["cpu"]))


def test_every_operator_without_a_row_or_kernel_has_a_definition():
    for name, operator in OPERATORS.items():
        assert hasattr(operator, "decompose") or operator.define is not Operator.define or name in NO_KERNELS


def test_kernels_of_the_cpu_take_plain_dense_tensors_of_one_device():
    x = torch.ones(2, 32)
    assert select._device_of((x, None)) == "cpu"
    assert select._device_of((torch.nn.Parameter(x), x)) == "cpu"
    for args in ((x.to("meta"),), (x, x.to("meta")), (x.to_sparse(),), (x, x.as_subclass(Subclass)), (None,)):
        assert select._device_of(args) is None


def test_kernels_take_elements_of_at_most_8_bits():
    kernel = select.KERNELS["quantize_mx"]["cpu"]
    for name, element in ELEMENTS.items():
        assert select._takes(kernel, (MXSpec(name, 32, 0),)) != element.is_wide


def test_the_definition_runs_where_a_kernel_returns_none(monkeypatch):
    x, spec = torch.randn(2, 32), MXSpec("mxfp4", axis=1)
    want = reference_chunked.fake_quantize(x, spec, None)
    calls = []
    monkeypatch.setattr(quantize, "fake_quantize", lambda *args: calls.append(args))
    got = selected.fake_quantize(x, spec)
    assert torch.equal(got, want) and len(calls) == 1
