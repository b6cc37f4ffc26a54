"""Packed weights as constants of ONNX's own types for their elements and scales (opset 24).

The target "native": the nodes and functions of the target "pt2mx", where nodes read codes as FLOAT4E2M1, FLOAT8E4M3FN
and FLOAT8E5M2, and scales as FLOAT8E8M0 and FLOAT8E4M3FN. onnxruntime runs it: it casts FP8 codes and all scales when a
session starts, and decodes FP4 codes in each call. Constants that another node reads stay bytes, such as embeddings,
because ONNX's Gather takes none of these types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pt2mx.kernels.elements import NAN_SCALE
from pt2mx.kernels.float_scales import scale_values
from pt2mx.kernels.packing import pack, unpack
from pt2mx.pt2e.onnx.files import as_torch, fresh_name, raise_opset, remove_unused, used_names
from pt2mx.pt2e.onnx.function import onnx
from pt2mx.pt2e.onnx.function_bodies import add_bodies
from pt2mx.pt2e.onnx.nodes import DequantizeMX, graphs_in

_TYPE = onnx.TensorProto
#: the first opset whose QuantizeLinear and DequantizeLinear take E8M0 scales
NATIVE_OPSET = 24
#: element -> the type of a tensor of its codes
NATIVE = {
    "fp4_e2m1": _TYPE.FLOAT4E2M1,
    "fp8_e4m3": _TYPE.FLOAT8E4M3FN,
    "fp8_e5m2": _TYPE.FLOAT8E5M2,
    "int8": _TYPE.INT8,
    "int8_full": _TYPE.INT8,
}


def to_native(model: Any) -> Any:
    """Give the constants of `DequantizeMX` nodes native types, add the functions of all nodes, and return the model.

    A model of a lower opset is converted to 24.
    """
    model = raise_opset(model, NATIVE_OPSET)
    constants = NativeConstants(model.graph, used_names(model.graph))
    nodes = [node for graph in graphs_in(model.graph) for node in graph.node]
    others = {name for node in nodes if DequantizeMX.of(node) is None for name in node.input}
    for node in model.graph.node:
        attributes = DequantizeMX.of(node)
        if attributes is None or not constants.packed.keys() - others >= {*node.input}:
            continue
        codes, scale, tensor_scale = (*node.input, "")[:3]
        if _has_native_codes(attributes, len(constants.packed[codes].dims)):
            node.input[0] = constants.codes(codes, attributes)
        if attributes.spec.has_power_of_two_scale or tensor_scale:
            node.input[1] = constants.scales(scale, attributes, tensor_scale, in_units=False)
    remove_unused(model.graph)
    return add_bodies(model)


def _has_native_codes(attributes: DequantizeMX, rank: int) -> bool:
    """Return whether the function of a node has an operator of onnxruntime for its native codes."""
    spec = attributes.spec
    if spec.element.name == "fp4_e2m1":  # what GatherBlockQuantized takes
        return rank > 1 and spec.block_rows == 1 and spec.block_size >= 16 and spec.block_size.bit_count() == 1
    return spec.element.name in NATIVE and not spec.element.is_int


def is_native(attributes: DequantizeMX) -> bool:
    """Return whether DequantizeLinear has the element and the blocks of a weight."""
    return attributes.spec.element.name in NATIVE and attributes.spec.block_rows == 1


class NativeConstants:
    """The packed codes and scales of a graph as constants of native types.

    Nodes that share codes or scales share the native constant, unless their attributes ask for different ones.

    Args:
        graph, used: the graph and the names in use, which change.
        in_blocks: split the axis of codes and scales, of whole blocks, to (blocks, block) and (blocks, 1).
    """

    def __init__(self, graph: Any, used: set[str], in_blocks: bool = False) -> None:
        self.packed = {tensor.name: tensor for tensor in graph.initializer}
        self._graph, self._used, self._in_blocks = graph, used, in_blocks
        self._names: dict[object, str] = {}

    def codes(self, name: str, attributes: DequantizeMX) -> str:
        """Return the name of the native codes of a weight with these attributes."""
        key = attributes.spec.element.name, attributes.length
        return self._native(name, attributes, attributes.spec.block_size, key, lambda c: _codes(c, attributes))

    def scales(self, name: str, attributes: DequantizeMX, tensor_scale: str = "", in_units: bool = True) -> str:
        """Return the name of the native scales of a weight with these attributes. With a tensor scale they are not yet
        multiplied by it. `in_units`: those of integers multiply codes instead of values, and are floats."""
        spec, key = attributes.spec, 0
        if tensor_scale:
            convert = functools.partial(_bytes_as, dtype=_TYPE.FLOAT8E4M3FN)
        elif not spec.has_power_of_two_scale:
            convert = functools.partial(_float_scales, attributes=attributes)
        elif spec.element.is_int and in_units:
            key, convert = spec.element.mantissa_bits, functools.partial(_units, attributes=attributes)
        else:
            convert = functools.partial(_bytes_as, dtype=_TYPE.FLOAT8E8M0)
        return self._native(name, attributes, 1, key, convert)

    def shape(self, sizes: list[int]) -> str:
        """Return the name of a constant shape."""
        key = tuple(sizes)
        if key not in self._names:
            self._names[key] = fresh_name("shape", self._used)
            self._graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(sizes), self._names[key]))
        return self._names[key]

    def _native(
        self, name: str, attributes: DequantizeMX, size: int, key: object, convert: Callable[[Tensor], Any]
    ) -> str:
        """Return the name of a converted constant, whose blocks have that size along the axis."""
        key = name, attributes.spec.axis, size, key
        if key not in self._names:
            tensor = convert(as_torch(self.packed[name]))
            tensor.name = self._names[key] = fresh_name(f"{name}_native", self._used)
            if self._in_blocks:
                dims = [*tensor.dims]
                axis = attributes.spec.axis % len(dims)
                tensor.ClearField("dims")
                tensor.dims.extend([*dims[:axis], dims[axis] // size, size, *dims[axis + 1 :]])
            self._graph.initializer.append(tensor)
        return self._names[key]


def _codes(packed: Tensor, attributes: DequantizeMX) -> Any:
    axis, element = attributes.spec.axis % packed.dim(), attributes.spec.element
    codes = unpack(packed, axis, element.bits).to(torch.uint8)
    if attributes.length > 0:
        codes = codes.narrow(axis, 0, attributes.length)
    raw = codes.flatten()
    if element.bits == 4:  # ONNX packs two codes into a byte in row-major order, the first in the low bits
        raw = pack(raw.to(torch.int32), 0, element.bits)
    return onnx.helper.make_tensor("", NATIVE[element.name], codes.shape, raw.numpy().tobytes(), raw=True)


def _bytes_as(scales: Tensor, dtype: int) -> Any:
    return onnx.helper.make_tensor("", dtype, scales.shape, scales.numpy().tobytes(), raw=True)


def _float_scales(scales: Tensor, attributes: DequantizeMX) -> Any:
    """Return scales with a significand as float32."""
    return onnx.numpy_helper.from_array(scale_values(scales, attributes.spec).numpy())


def _units(scales: Tensor, attributes: DequantizeMX) -> Any:
    """Return the values of a code's unit, for E8M0 scales of integers."""
    exponents = scales.numpy().astype(np.int32) - 127 - attributes.spec.element.mantissa_bits
    units = np.where(scales.numpy() == NAN_SCALE, np.float32(np.nan), np.ldexp(np.float32(1), exponents))
    return onnx.numpy_helper.from_array(units)
