"""The reference evaluator of ONNX: `Cast` to elements, and `DequantizeLinear` with E8M0 scales (opset 25)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from pt2mx.conformance.adapters.case import Case

_TYPES = {
    "fp8_e4m3": TensorProto.FLOAT8E4M3FN,
    "fp8_e5m2": TensorProto.FLOAT8E5M2,
    "fp4_e2m1": TensorProto.FLOAT4E2M1,
}
_OPSET = 25


def cases() -> Iterator[Case]:
    """Yield the elements that ONNX has."""
    for name, element in _TYPES.items():
        there = helper.make_node("Cast", ["x"], ["codes"], to=element, saturate=1)
        back = helper.make_node("Cast", ["codes"], ["y"], to=TensorProto.FLOAT)
        cast = _evaluator([there, back], x=TensorProto.FLOAT)
        options = {"axis": 1, "block_size": 32, "output_dtype": TensorProto.FLOAT}
        node = helper.make_node("DequantizeLinear", ["x", "scale"], ["y"], **options)
        decoder = _evaluator([node], x=element, scale=TensorProto.FLOAT8E8M0)
        packing = "bytes" if name == "fp4_e2m1" else None
        yield Case(
            name,
            partial(_quantize, cast),
            partial(_dequantize, decoder, element),
            packing=packing,
            framework="numpy",
            elements_only=True,
        )


def _evaluator(nodes: list, **inputs: int) -> ReferenceEvaluator:
    values = [helper.make_tensor_value_info(name, dtype, [None, None]) for name, dtype in inputs.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, None])
    graph = helper.make_graph(nodes, "graph", values, [output])
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)]))


def _quantize(cast: ReferenceEvaluator, x: np.ndarray) -> np.ndarray:
    return cast.run(None, {"x": x})[0]


def _dequantize(decoder: ReferenceEvaluator, element: int, data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    codes = data.view(helper.tensor_dtype_to_np_dtype(element))
    scales = scale.view(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E8M0))
    return decoder.run(None, {"x": codes, "scale": scales})[0]
