"""What TorchMX asserts, and programs may expect: an `AssertionError` that is an `MXError` too."""

import pytest
import torch

from pt2mx import MXError
from pt2mx.torchmx import (
    MXAssertionError,
    MXConfig,
    MXInferenceLinear,
    MXTensor,
    QAttentionConfig,
    QLinearConfig,
    dtypes,
)
from pt2mx.torchmx.mx_tensor import ToMXConstrFunc, dequantize_mx, quantize_mx

SCALE, DATA, X = torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 64)
FP8 = MXConfig("float8_e4m3")


def mx(*shape: int) -> MXTensor:
    return MXTensor.to_mx(torch.ones(shape), dtypes.float8_e4m3, 2)


def linear() -> MXInferenceLinear:
    return MXInferenceLinear.from_float(torch.nn.Linear(64, 2), QLinearConfig(FP8, FP8))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: quantize_mx(X.double(), "int8", 32), "dtype torch.float64"),
        (lambda: torch.ops.torchmx.quantize_mx(X.double(), "int8", 32), "dtype torch.float64"),
        (lambda: dequantize_mx(DATA, SCALE, "int8", 32, torch.float64, 1), "torch.float64"),
        (lambda: torch.ops.torchmx.dequantize_mx(DATA, SCALE, "int8", 32, torch.int8, 1), "torch.int8"),
        (lambda: MXTensor.to_mx(X.double(), dtypes.int8), "dtype torch.float64"),
        (lambda: ToMXConstrFunc.apply(X.double(), dtypes.int8, 32), "dtype torch.float64"),
        (lambda: MXTensor.to_mx(X, "float9"), "unknown MX"),
        (lambda: MXTensor(SCALE.int(), DATA, dtypes.int8, 32, torch.float32), "are uint8"),
        (lambda: MXTensor(SCALE, DATA.int(), dtypes.int8, 32, torch.float32), "uint8 or int8"),
        (lambda: MXTensor(SCALE, DATA, dtypes.float32, 32, torch.float32), "unknown MX element format"),
        (lambda: MXTensor(SCALE, DATA, dtypes.int8, 16, torch.float32), "64 bytes"),
        (lambda: mx(2, 4).to(torch.float64), "cannot become torch.float64"),
        (lambda: mx(11, 3, 5).view(165), "would split a block"),
        (lambda: mx(11, 3, 4).transpose(1, 2).view(132), "view size is not compatible"),
        (lambda: mx(5, 5, 3, 4).transpose(1, 3).view(25, 4, 3), "view size is not compatible"),
        (lambda: linear()(X.double()), "dtype torch.float64"),
        (lambda: QAttentionConfig(QLinearConfig(FP8, FP8), FP8), "give all of"),
    ],
)
def test_what_torchmx_asserts(call, match):
    with pytest.raises(AssertionError, match=match) as caught:
        call()
    assert isinstance(caught.value, MXAssertionError) and isinstance(caught.value, MXError)


def test_what_it_does_not_assert():
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        mx(2, 4).view(7)
    for call in (lambda: mx(2, 4).mean(0), lambda: MXConfig("int99")):
        with pytest.raises(MXError) as caught:
            call()
        assert not isinstance(caught.value, AssertionError)
