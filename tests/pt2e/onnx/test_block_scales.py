"""The scale of a block in an ONNX function, next to the thresholds at which it rounds up."""

import numpy as np
import pytest
import torch
from onnx import TensorProto

from pt2mx import ELEMENTS, MXSpec
from pt2mx.modes import SCALE_MODES
from pt2mx.pt2e.onnx.block_scales import _rounding_up
from pt2mx.pt2e.onnx.nodes import FakeQuantizeMX
from tests.compare import differing
from tests.onnx_nodes import model_of, operator, run
from tests.oracle import modes_of

MODES = [(name, mode) for name in ELEMENTS for mode in modes_of(name) if not SCALE_MODES[mode].searches]


def next_to(threshold: int) -> torch.Tensor:
    """Return positive floats of each exponent, subnormal ones too, with mantissas next to the threshold, (N, 1)."""
    mantissas = np.clip(np.r_[threshold + np.arange(-3, 4), np.arange(3), 2**23 - 1 - np.arange(3)], 0, 2**23 - 1)
    normal = (np.arange(1, 255)[:, None] << 23) + mantissas
    subnormal = (2**23 + mantissas) >> np.arange(1, 24)[:, None]
    bits = np.unique(np.concatenate([normal.ravel(), subnormal.ravel(), subnormal.ravel() + 1]))
    return torch.from_numpy(bits.astype(np.int32).view(np.float32)[:, None])


@pytest.mark.parametrize(
    "element", ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8", "int4", "fp8_e1m6"]
)
def test_scales_next_to_each_threshold(element):
    for mode in (mode for name, mode in MODES if name == element):
        x = next_to(SCALE_MODES[mode].threshold(ELEMENTS[element]))
        node = FakeQuantizeMX(MXSpec(element, 1, scale_mode=mode), 1)
        (y,) = run(model_of([node.make(["X"], "Y")], {"X": (TensorProto.FLOAT, [None, 1])}), x)
        assert not differing(y, operator(node, x)).any(), mode


def test_there_are_factors_for_every_mode_of_every_element():
    for name, mode in MODES:
        threshold = SCALE_MODES[mode].threshold(ELEMENTS[name])
        above, largest = np.float32(1 + (threshold + 1) * 2.0**-23), np.float32(2 - 2.0**-23)
        products = [np.nextafter(above, np.float32(0)), above, np.float32(1), largest]
        for factor in _rounding_up(threshold):
            products = [product * np.float32(factor) for product in products]
        assert products[0] <= 2 < products[1] and products[2] > 1 and products[3] <= 4, (name, mode)
