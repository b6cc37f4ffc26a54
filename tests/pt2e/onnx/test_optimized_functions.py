"""ONNX functions after onnxscript's optimizer: it inlines them, folds constants and drops operations without effect."""

import pytest
import torch
from onnx import TensorProto

from pt2mx import ELEMENTS, MXSpec
from pt2mx.extras import import_extra
from pt2mx.kernels.packing import packed_length
from pt2mx.modes import SCALE_MODES
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX
from tests.compare import differing
from tests.onnx_nodes import model_of, operator, run
from tests.oracle import modes_of
from tests.random_values import random_values

FAST = ["fp8_e4m3", "fp4_e2m1", "int8"]
OTHERS = [name for name, element in ELEMENTS.items() if element.bits <= 8 and name not in FAST]


def optimized(model):
    return import_extra("onnxscript", "onnx").optimizer.optimize(model)


def wrong_values(nodes, inputs, feeds):
    """Count the values that differ from the results of pt2mx's operators."""
    outputs = run(
        optimized(model_of([node.make(list(feeds), f"Y{i}") for i, node in enumerate(nodes)], inputs)), *feeds.values()
    )
    return [int(differing(y, operator(node, *feeds.values())).sum()) for node, y in zip(nodes, outputs, strict=True)]


@pytest.mark.slow_except("fp4_e2m1")
@pytest.mark.parametrize("element", FAST + [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS])
def test_fake_quantize(element):
    torch.manual_seed(0)
    x = torch.cat([random_values((64, 32), torch.float32, kind) for kind in range(5)])
    for row, value in enumerate((0.0, -0.0, 2.0**-149, 3.4e38, torch.nan, torch.inf)):
        x[row::37, row] = value
        x[60 + row] = value
    nodes = [
        FakeQuantizeMX(MXSpec(element, scale_mode=mode, rounding=rounding), 32)
        for mode in modes_of(element)
        if not SCALE_MODES[mode].searches
        for rounding in ("even", "half_away", "half_up")
    ]
    assert not any(wrong_values(nodes, {"X": (TensorProto.FLOAT, [None, 32])}, {"X": x}))


@pytest.mark.parametrize(("element", "length"), [("fp4_e2m1", 32), ("fp6_e2m3", 40)])
def test_dequantize(element, length):
    torch.manual_seed(0)
    shapes = {"codes": (256, packed_length(length, ELEMENTS[element].bits)), "scale": (256, -(-length // 32))}
    feeds = {name: torch.randint(0, 256, shape, dtype=torch.uint8) for name, shape in shapes.items()}
    inputs = {name: (TensorProto.UINT8, [None, shape[1]]) for name, shape in shapes.items()}
    assert not any(wrong_values([DequantizeMX(MXSpec(element), length)], inputs, feeds))
