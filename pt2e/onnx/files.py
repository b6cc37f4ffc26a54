"""ONNX models in files: read, converted to an opset, checked and written as a whole."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.onnx.nodes import graphs_in
from pt2mx.pt2e.output import whole_file

if TYPE_CHECKING:
    from onnx import ModelProto

onnx = import_extra("onnx", "onnx")

#: the most bytes that protobuf writes to a file
_LIMIT = 2**31 - 1
#: the lowest opset and IR version of a model with our functions: IR 10 has overloads of functions
OPSET, IR_VERSION = 18, 10


def read_model(path: str | os.PathLike[str]) -> ModelProto:
    """Read an ONNX file, with its external data.

    Raises:
        MXError: if the file is no ONNX model, or its external data is missing.
    """
    try:
        model = onnx.load(os.fspath(path))
    except Exception as error:  # protobuf's error for a damaged file, or onnx's error for missing data
        raise MXError(f"{str(path)!r} is no ONNX file that can be read: {first_line(error)}") from None
    if not model.graph.node:
        raise MXError(f"{os.fspath(path)!r} holds no graph: give the ONNX file of a model")
    return model


def opset_of(model: ModelProto) -> int:
    """Return the version of ONNX's own operators that a model imports."""
    return next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)


def raise_opset(model: ModelProto, opset: int = OPSET) -> ModelProto:
    """Return a model of at least this opset: the model itself, or a conversion of it.

    Raises:
        MXError: if ONNX's converter fails.
    """
    nodes = (node for graph in graphs_in(model.graph) for node in graph.node)
    for entry in (*model.opset_import, *nodes):
        if entry.domain == "ai.onnx":  # another spelling
            entry.domain = ""
    # before IR 4 every initializer is an input too, and the converter would treat it as one
    if model.ir_version < 4:
        initializers = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in initializers]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = 4
    if opset_of(model) < opset:
        try:
            model = onnx.version_converter.convert_version(model, opset)
        except Exception as error:
            raise MXError(
                f"opset {opset_of(model)} cannot be converted to {opset}, which MX functions need: "
                f"{first_line(error)}; export the model anew"
            ) from None
    needed = onnx.helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
    model.ir_version = max(model.ir_version, needed, IR_VERSION)
    return model


def check_model(model: ModelProto, name: str) -> None:
    """Raise an MXError for a model that onnx's checker rejects. A model larger than a file is not checked."""
    if _exceeds_file(model):
        return
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise MXError(f"{name} is not valid: {first_line(error)}") from None


def serialized(model: ModelProto) -> bytes:
    """Return the bytes of a model's file.

    Raises:
        MXError: for a model that is too large for one, or that onnx's checker rejects.
    """
    if _exceeds_file(model):
        raise MXError(f"the model has more than the {_LIMIT:,} bytes of an ONNX file: quantize more of it, or parts")
    check_model(model, "the model that was written")
    return model.SerializeToString()


def write_model(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model as one file, which replaces `path` when it is complete.

    Raises:
        MXError: as `serialized` and `whole_file`.
    """
    data = serialized(model)
    with whole_file(path) as file:
        file.write(data)


def _exceeds_file(model: ModelProto) -> bool:
    try:
        return model.ByteSize() > _LIMIT
    except Exception:  # protobuf's EncodeError, for a model that is too large to count its bytes
        return True


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
