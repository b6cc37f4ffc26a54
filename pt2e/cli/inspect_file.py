"""The command `pt2mx inspect`: print the contents of a program, a package, an ONNX file or a language model."""

from __future__ import annotations

import argparse

from pt2mx.extras import import_extra
from pt2mx.pt2e.cli.progress import note
from pt2mx.pt2e.cli.result import Result
from pt2mx.pt2e.files.user_errors import user_errors
from pt2mx.pt2e.inspect.inspect_file import inspect_file
from pt2mx.pt2e.inspect.schema import FileInfo, as_json, table
from pt2mx.pt2e.program.provenance import other_version


def run(options: argparse.Namespace) -> Result:
    with user_errors(f"read {options.file!r}"):
        files = [_onnx_info(options.file)] if _is_onnx(options.file) else inspect_file(options.file)
    for info in files:
        if not _is_onnx(info.file) and (text := other_version(info.file)):
            note(text)
    return Result("\n\n\n".join(map(table, files)), {"files": [as_json(info) for info in files]})


def _is_onnx(path: str) -> bool:
    return path.lower().endswith(".onnx")


def _onnx_info(path: str) -> FileInfo:
    import_extra("onnx", "onnx")
    from pt2mx.pt2e.onnx.contents import onnx_info  # imports onnx

    return onnx_info(path)
