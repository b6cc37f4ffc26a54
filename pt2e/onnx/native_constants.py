"""Packed codes and E8M0 scales as constants of ONNX's native types: FP4 and FP8 codes as FLOAT4E2M1, FLOAT8E4M3FN and
FLOAT8E5M2 with FLOAT8E8M0 scales, integers as INT8 with float scales, for they count in 2**-6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pt2mx.kernels.elements import NAN_SCALE
from pt2mx.kernels.packing import pack, unpack
from pt2mx.pt2e.onnx.function import onnx
from pt2mx.pt2e.onnx.names import unused
from pt2mx.pt2e.onnx.nodes import DequantizeMX

_TYPE = onnx.TensorProto
#: element -> the type of a tensor of its codes
NATIVE = {
    "fp4_e2m1": _TYPE.FLOAT4E2M1,
    "fp8_e4m3": _TYPE.FLOAT8E4M3FN,
    "fp8_e5m2": _TYPE.FLOAT8E5M2,
    "int8": _TYPE.INT8,
    "int8_full": _TYPE.INT8,
}


class NativeConstants:
    """The packed codes and scales of a graph as constants of native types. One that several nodes read in one way, as
    scales that are equal, becomes one constant, and one for each way where they differ."""

    def __init__(self, graph: Any, taken: set[str]) -> None:
        self.packed = {tensor.name: tensor for tensor in graph.initializer}
        self._graph, self._taken = graph, taken
        self._names: dict[tuple[object, ...], str] = {}

    def codes(self, name: str, attributes: DequantizeMX) -> str:
        """Return the name of the native codes of a weight with these attributes."""
        way = (attributes.element, attributes.axis, attributes.length)
        return self._native(name, way, lambda packed: _codes(packed, attributes))

    def scales(self, name: str, attributes: DequantizeMX) -> str:
        """Return the name of the native scales of a weight with these attributes."""
        element = attributes.spec.element
        return self._native(name, (element.mantissa_bits,) if element.is_int else (), lambda s: _scales(s, attributes))

    def _native(self, name: str, way: tuple[object, ...], convert: Callable[[Tensor], Any]) -> str:
        key = (name, *way)
        if key not in self._names:
            tensor = convert(torch.from_numpy(np.array(onnx.numpy_helper.to_array(self.packed[name]))))
            tensor.name = self._names[key] = unused(f"{name}_native", self._taken)
            self._graph.initializer.append(tensor)
        return self._names[key]


def _codes(packed: Tensor, attributes: DequantizeMX) -> Any:
    """The tensor of packed codes in the native type of their element."""
    axis, element = attributes.axis % packed.dim(), attributes.spec.element
    codes = unpack(packed, axis, element.bits).to(torch.uint8)
    if attributes.length > 0:
        codes = codes.narrow(axis, 0, attributes.length)
    raw = codes.flatten()
    if element.bits == 4:  # two a byte in row-major order, the first in the low bits
        raw = pack(raw.to(torch.int32), 0, element.bits)
    return onnx.helper.make_tensor("", NATIVE[element.name], codes.shape, raw.numpy().tobytes(), raw=True)


def _scales(scales: Tensor, attributes: DequantizeMX) -> Any:
    """The tensor of E8M0 scales as it is, and that of integers as the values of a code's unit."""
    element = attributes.spec.element
    if not element.is_int:
        return onnx.helper.make_tensor("", _TYPE.FLOAT8E8M0, scales.shape, scales.numpy().tobytes(), raw=True)
    unit = np.ldexp(np.float32(1), scales.numpy().astype(np.int32) - 127 - element.mantissa_bits)
    return onnx.numpy_helper.from_array(np.where(scales.numpy() == NAN_SCALE, np.float32(np.nan), unit))
