"""ONNX files: read and written whole."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pt2mx.errors import MXError
from pt2mx.pt2e.onnx.function import onnx
from pt2mx.pt2e.onnx.opsets import first_line
from pt2mx.pt2e.output import whole_file

if TYPE_CHECKING:
    from onnx import ModelProto

#: bytes of the largest file that protobuf writes
_MOST = 2**31 - 1


def read_model(path: str | os.PathLike[str]) -> ModelProto:
    """Read an ONNX file, with its external data.

    Raises:
        MXError: where the file is no ONNX model, or data of it is missing.
    """
    try:
        model = onnx.load(os.fspath(path))
    except Exception as error:  # protobuf's, of a damaged file, or of external data that is missing
        raise MXError(f"{str(path)!r} is no ONNX file that can be read: {first_line(error)}") from None
    if not model.graph.node:
        raise MXError(f"{os.fspath(path)!r} holds no graph: give the ONNX file of a model")
    return model


def check_model(model: ModelProto, name: str) -> None:
    """Raise an MXError for a model that onnx's checker refuses; it takes none that is larger than a file."""
    if _is_larger_than_a_file(model):
        return
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise MXError(f"{name} is not valid: {first_line(error)}") from None


def serialized(model: ModelProto) -> bytes:
    """The bytes of a model's file.

    Raises:
        MXError: for a model that is too large for one, or that onnx's checker refuses.
    """
    if _is_larger_than_a_file(model):
        raise MXError(f"the model has more than the {_MOST:,} bytes of an ONNX file: quantize more of it, or parts")
    check_model(model, "the model that was written")
    return model.SerializeToString()


def write_model(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model in one file, which takes the place of `path` when it is whole.

    Raises:
        MXError: as `serialized` and `whole_file`.
    """
    data = serialized(model)
    with whole_file(path) as file:
        file.write(data)


def _is_larger_than_a_file(model: ModelProto) -> bool:
    try:
        return model.ByteSize() > _MOST
    except Exception:  # protobuf's EncodeError: it does not even count beyond
        return True
