"""A model-local function, written node by node."""

from __future__ import annotations

from typing import Any

import numpy as np

from pt2mx.extras import import_extra
from pt2mx.pt2e.onnx.nodes import DOMAIN

onnx = import_extra("onnx", "onnx")

#: operators whose float constants have one dimension: onnxscript's optimizer drops a scalar factor within 1e-5 of one,
#: and a scalar term within 1e-8 of zero
_ARITHMETIC = {"Add", "Sub", "Mul", "Div"}

#: an input of a node: the name of a value, or a constant; Python floats are float32, integers int64
Input = str | float | list[int] | np.ndarray


class Function:
    """The body of a node of the domain `pt2mx`, under construction.

    Args:
        name: the node's `op_type`.
        inputs: the names of the inputs.
        attributes: the names of the attributes that nodes carry; the body reads none.
    """

    def __init__(self, name: str, inputs: list[str], attributes: list[str]) -> None:
        self._name, self._inputs, self._attributes = name, inputs, attributes
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._nodes: list[Any] = []

    def op(self, op_type: str, *inputs: Input, output: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        dimensions = 1 if op_type in _ARITHMETIC else 0
        names = [value if isinstance(value, str) else self._constant(value, dimensions) for value in inputs]
        output = output or f"{op_type.lower()}_{len(self._nodes)}"
        self._nodes.append(onnx.helper.make_node(op_type, names, [output], **attributes))
        return output

    def proto(self, opset: int) -> Any:
        """The `FunctionProto`, whose output is Y."""
        imports = [onnx.helper.make_opsetid("", opset)]
        return onnx.helper.make_function(
            DOMAIN, self._name, self._inputs, ["Y"], self._nodes, imports, attributes=self._attributes
        )

    def _constant(self, value: float | list[int] | np.ndarray, dimensions: int) -> str:
        if isinstance(value, float):
            array = np.full((1,) * dimensions, value, np.float32)
        else:
            array = value if isinstance(value, np.ndarray) else np.asarray(value, np.int64)
        key = str(array.dtype), array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=onnx.numpy_helper.from_array(array))
        return self._constants[key]
