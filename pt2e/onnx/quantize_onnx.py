"""`quantize_onnx`: from a float ONNX file to one in MX formats, file to file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.onnx.bodies import add_bodies
from pt2mx.pt2e.onnx.files import serialized, write_model
from pt2mx.pt2e.onnx.float_graph import FloatGraph, read_float
from pt2mx.pt2e.onnx.float_plan import NodePlan, plan
from pt2mx.pt2e.onnx.float_report import OnnxReport, bytes_of, rows
from pt2mx.pt2e.onnx.float_rewrite import Rewriter, as_torch
from pt2mx.pt2e.onnx.float_settings import quantizer_of
from pt2mx.pt2e.onnx.function import onnx
from pt2mx.pt2e.onnx.opsets import first_line
from pt2mx.pt2e.onnx.targets import rewriter_of
from pt2mx.pt2e.output import check_distinct, check_output
from pt2mx.pt2e.report.agreement import Fidelity, fidelity
from pt2mx.pt2e.report.finite import listed


def quantize_onnx(
    input: str | os.PathLike[str],
    output: str | os.PathLike[str],
    config: object,
    calibration: Iterable[Mapping[str, np.ndarray]] | None = None,
    *,
    target: str = "pt2mx",
    allow_nan: bool = False,
) -> OnnxReport:
    """Quantize a float ONNX file to one in MX formats that stock onnxruntime runs.

    Constant operands of MatMul, Gemm, Conv, ConvTranspose, LSTM, GRU, RNN and embeddings (Gather) become codes and
    scales, which the file decodes; computed operands are quantized and dequantized at each call. Both are nodes of the
    domain `pt2mx` with bodies of standard operators. Blocks run along the dimension that a node reduces. A batch norm
    right after a convolution is folded into it first. What lies in graphs inside (If, Loop, Scan) stays as it is, and
    the report says so.

    Args:
        input: of the float file; of an opset below 18 it is converted to 18.
        output: of the quantized file.
        config: an `MXQuantizer`, an `MXQuantizationConfig`, the name or file of a recipe, or the dictionary of Quark's
            MX configuration (`element_dtype`, `block_size`, `rounding_mode`; each node sets the axis, as Quark does)
            for weights and activations. Names of modules mean nodes: by the node's own name ("/encoder/MatMul", also
            "encoder.MatMul"), the scopes that torch.onnx.export notes, and the name of the weight ("conv1" of
            "conv1.weight"); types of modules those of nodes ("Conv") and the classes that are noted.
        calibration: batches by the names of inputs, to compare the outputs of both files; scales follow from each
            block, so that none is needed.
        target: nodes of pt2mx's domain, "quark" or "standard", as `pt2mx.export_onnx` takes it.
        allow_nan: quantize weights that hold a NaN or an Inf, which become NaN in blocks.

    Returns:
        An `OnnxReport`, a `QuantizationReport` of the nodes, with `fidelity` where batches are given.

    Raises:
        MXError: for a file that is no float ONNX model or cannot be converted, a setting that is not for ONNX files,
            weights that are not finite, a batch that the model does not take, and where no file can be written. A
            warning names settings that mean no node.

    Example:
        >>> import tempfile, torch, pt2mx
        >>> model, x = torch.nn.Linear(64, 64, bias=False).eval(), torch.ones(1, 64)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
        ...     program.save(f"{folder}/float.onnx")
        ...     report = pt2mx.quantize_onnx(f"{folder}/float.onnx", f"{folder}/mx.onnx", "mxfp4")
        >>> report.bytes_before, report.bytes_after
        (16384, 2176)
    """
    quantizer, rewrite = quantizer_of(config), rewriter_of(target)
    if isinstance(calibration, Mapping) or not isinstance(calibration, Iterable | None):
        raise MXError(f"calibration must be a list of batches by name, not of type {type(calibration).__name__}")
    check_output(output)
    check_distinct({"output": output}, {"input": input})
    graph = FloatGraph(read_float(input))
    plans = plan(graph, quantizer)
    operators, before = rows(graph, plans), list(graph.graph.initializer)
    if not any(plans):
        reasons = dict.fromkeys(row.reason for row in operators if row.reason)
        reason = "; ".join(reasons) or "it holds no MatMul, Gemm, Conv, recurrent layer or embedding"
        raise MXError(f"nothing to quantize in {os.fspath(input)!r}: {reason}")
    if not allow_nan:
        _refuse_nan(plans)
    values = sum(int(np.prod(constant.dims)) for constant in before)
    bytes_before = sum(map(bytes_of, before))
    Rewriter(graph).apply(plans)
    bytes_after = sum(map(bytes_of, graph.graph.initializer))
    found = None
    if calibration is not None:  # of the nodes with bodies, whatever the target: they are what onnxruntime runs
        copy = onnx.ModelProto()
        copy.CopyFrom(graph.model)
        found = _compared(serialized(add_bodies(copy)), os.fspath(input), calibration)
    write_model(rewrite(graph.model), output)
    return OnnxReport(operators, values, bytes_before, bytes_after, found)


def _refuse_nan(plans: list[NodePlan]) -> None:
    constants = {o.source.constant.name: o.source.constant for p in plans for o in p.operands if o.source}
    if names := [name for name, constant in constants.items() if not as_torch(constant).isfinite().all()]:
        raise MXError(f"NaN or Inf in the weights {listed(names)}: mend them, or allow NaN to quantize all the same")


def _compared(quantized: bytes, path: str, batches: Iterable[Mapping[str, np.ndarray]]) -> Fidelity:
    """Compare the outputs of both files."""
    runtime = import_extra("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is raised too
    try:
        sessions = [runtime.InferenceSession(m, options, providers=["CPUExecutionProvider"]) for m in (path, quantized)]
    except Exception as error:  # onnxruntime's, of operators that it lacks
        raise MXError(f"cannot compare outputs: onnxruntime does not run {path!r}: {first_line(error)}") from None
    return fidelity((got, want) for want, got in _outputs(sessions, batches))


def _outputs(sessions: list[Any], batches: Iterable[Mapping[str, np.ndarray]]) -> Iterator[list[list[torch.Tensor]]]:
    """The outputs of each session, batch by batch."""
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise MXError(f"batch {number} must be a mapping of inputs by name, not of type {type(batch).__name__}")
        try:
            feeds = {name: np.asarray(value) for name, value in batch.items()}
            outputs = [[torch.from_numpy(np.asarray(y)) for y in session.run(None, feeds)] for session in sessions]
        except Exception as error:  # onnxruntime's, of names, types and shapes
            raise MXError(f"batch {number}: {first_line(error)}") from None
        yield outputs
