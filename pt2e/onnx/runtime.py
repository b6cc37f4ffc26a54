"""Run ONNX files on the CPU: in onnxruntime, or in OpenVINO."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pt2mx.errors import MXError, nearest
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import one_line

Arrays = Mapping[str, np.ndarray]


class Runnable(NamedTuple):
    """A file in a runtime: call it with arrays by the names of the inputs, for arrays by the names of the outputs."""

    #: a key of `RUNTIMES`
    runtime: str
    #: the names of the inputs, in order
    inputs: list[str]
    call: Callable[[Arrays], dict[str, np.ndarray]]


def load(path: str | os.PathLike[str], runtime: str | None = None) -> Runnable:
    """Load an ONNX file into a runtime.

    Args:
        path: the file.
        runtime: `"onnxruntime"` or `"openvino"`; by default the first one that is installed and takes the file.
    """
    if runtime is not None and runtime not in RUNTIMES:
        raise MXError(f"unknown runtime {runtime!r}: {nearest(runtime, RUNTIMES)}")
    names = list(filter(importlib.util.find_spec, RUNTIMES)) if runtime is None else [runtime]
    if not names:
        extras = " or ".join(f"pip install 'pt2mx[{extra}]'" for extra, _ in RUNTIMES.values())
        raise MXError(f"neither {' nor '.join(RUNTIMES)} is installed, and one of them runs ONNX files: {extras}")
    reasons = []
    for name in names:
        extra, open_file = RUNTIMES[name]
        module = import_extra(name, extra)
        try:
            return open_file(module, os.fspath(path))
        except Exception as error:  # each has errors of its own for operators that it lacks
            reasons.append(f"{name} does not take it: {_reason(error)}")
    raise MXError(
        f"{os.fspath(path)!r} does not run here: {'; '.join(reasons)}. onnxruntime runs the targets 'pt2mx' and "
        "'native' of `pt2mx export-onnx`, OpenVINO the target 'openvino'"
    )


def _reason(error: Exception) -> str:
    """Return what an error says: OpenVINO lists the operators that it lacks below lines on its own sources."""
    lines = [line.strip("- ") for line in str(error).splitlines() if line.startswith("--")]
    return "; ".join(lines) if lines else one_line(error)


def _in_onnxruntime(module: Any, path: str) -> Runnable:
    options = module.SessionOptions()
    options.log_severity_level = 4  # errors are raised, too
    session = module.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    outputs = [value.name for value in session.get_outputs()]

    def call(feeds: Arrays) -> dict[str, np.ndarray]:
        return dict(zip(outputs, session.run(outputs, dict(feeds)), strict=True))

    return Runnable("onnxruntime", [value.name for value in session.get_inputs()], call)


def _in_openvino(module: Any, path: str) -> Runnable:
    # where a processor multiplies bfloat16 faster, OpenVINO would round float32 values to it
    model = module.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    # OpenVINO gives a tensor all names of operators that it leaves out
    graph = import_extra("onnx", "onnx").load(path, load_external_data=False).graph
    from pt2mx.pt2e.onnx.files import inputs_of  # imports onnx

    def call(feeds: Arrays) -> dict[str, np.ndarray]:
        results = model(dict(feeds))
        return {output.name: np.array(results[i]) for i, output in enumerate(graph.output)}

    return Runnable("openvino", [value.name for value in inputs_of(graph)], call)


#: runtime -> the extra that installs it, and what loads a file
RUNTIMES: dict[str, tuple[str, Callable[[Any, str], Runnable]]] = {
    "onnxruntime": ("onnx", _in_onnxruntime),
    "openvino": ("openvino", _in_openvino),
}
