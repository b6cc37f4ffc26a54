"""Quantize float ONNX files with `quantize_onnx`, and list the specs of the nodes."""

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto

from pt2mx import MXQuantizationConfig
from pt2mx.pt2e.onnx.nodes import DequantizeMX, FakeQuantizeMX
from pt2mx.pt2e.onnx.quantize.quantize_onnx import OnnxReport, quantize_onnx

FP4 = MXQuantizationConfig(weight="mxfp4", activation="mxfp8")
WEIGHTS = MXQuantizationConfig(weight="mxfp6_e3m2")
IMAGES = np.float32(np.random.RandomState(0).randn(2, 3, 8, 8))


def quantized(model: ModelProto, folder: Path, config: object = FP4, **options) -> tuple[OnnxReport, ModelProto]:
    """Return the report and the quantized model of a float model."""
    onnx.save(model, folder / "float.onnx")
    report = quantize_onnx(folder / "float.onnx", folder / "mx.onnx", config, **options)
    return report, onnx.load(folder / "mx.onnx")


def specs(model: ModelProto) -> dict[str, tuple[str, int, int, int]]:
    """Return output of a node of ours -> (element, block size, axis, length)."""
    nodes = [*FakeQuantizeMX.nodes_in(model), *DequantizeMX.nodes_in(model)]
    return {node.output[0]: (a.spec.element.name, a.spec.block_size, a.spec.axis, a.length) for node, a in nodes}
