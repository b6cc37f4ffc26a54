"""OpenVINO on the CPU: `Convert` to elements, and packed constants times E8M0 scales."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import openvino
from openvino import opset16

from pt2mx.conformance.adapters.case import Case

_TYPES = {"fp8_e4m3": openvino.Type.f8e4m3, "fp8_e5m2": openvino.Type.f8e5m2, "fp4_e2m1": openvino.Type.f4e2m1}


def cases() -> Iterator[Case]:
    """Yield the elements that OpenVINO has."""
    for name, element in _TYPES.items():
        x = opset16.parameter([-1, 32], np.float32)
        convert = _compiled(opset16.convert(opset16.convert(x, element), "f32"), [x])
        dequantize = partial(_dequantize, element, 8 // element.bitwidth)
        yield Case(name, partial(_quantize, convert), dequantize, framework="numpy", elements_only=True)


def _compiled(result: openvino.Output, inputs: list) -> openvino.CompiledModel:
    return openvino.compile_model(openvino.Model([opset16.result(result)], inputs), "CPU")


def _quantize(convert: openvino.CompiledModel, x: np.ndarray) -> np.ndarray:
    return convert(x)[0]


def _dequantize(element: openvino.Type, codes_a_byte: int, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    n = data.shape[1] * codes_a_byte
    codes = _constant(data, [len(data), n // 32, 32], element)
    scales = _constant(scale, [*scale.shape, 1], openvino.Type.f8e8m0)
    values = opset16.multiply(opset16.convert(codes, "f32"), opset16.convert(scales, "f32"))
    return _compiled(values, [])({})[0].reshape(len(data), n)


def _constant(data: np.ndarray, shape: list[int], dtype: openvino.Type) -> openvino.op.Constant:
    return openvino.op.Constant(openvino.Tensor(data, openvino.Shape(shape), dtype))
