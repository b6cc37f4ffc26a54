"""The opset of a model: what it is, and the least that our functions run at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pt2mx.errors import MXError
from pt2mx.pt2e.onnx.function import onnx
from pt2mx.pt2e.onnx.nodes import graphs_in

if TYPE_CHECKING:
    from onnx import ModelProto

#: the least opset and IR version of a model with our functions: IR 10 has their overloads
OPSET, IR_VERSION = 18, 10


def opset_of(model: ModelProto) -> int:
    """The version of ONNX's own operators that a model imports."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def raise_opset(model: ModelProto, least: int = OPSET) -> ModelProto:
    """A model of at least that opset: the model itself, or a conversion of it.

    Raises:
        MXError: where ONNX's converter fails.
    """
    nodes = (node for graph in graphs_in(model.graph) for node in graph.node)
    for entry in (*model.opset_import, *nodes):
        if entry.domain == "ai.onnx":  # another spelling
            entry.domain = ""
    opset = opset_of(model)
    if model.ir_version < 4:  # all initializers were inputs too, and could be fed; the converter takes them for inputs
        held = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in held]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = 4
    if opset < least:
        try:
            model = onnx.version_converter.convert_version(model, least)
        except Exception as error:
            raise MXError(
                f"opset {opset} cannot be converted to {least}, which MX functions need: {first_line(error)}; export "
                "the model anew"
            ) from None
    needed = onnx.helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    model.ir_version = max(model.ir_version, needed, IR_VERSION)
    return model


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
