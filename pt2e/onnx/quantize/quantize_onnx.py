"""`quantize_onnx`: quantize a float ONNX file to one in MX formats, and report the formats of each node."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper

from pt2mx.analysis.agreement import Fidelity, fidelity
from pt2mx.errors import MXError, listed
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.output import check_distinct, check_output
from pt2mx.pt2e.flow.packed_weights import packed_bytes, storage_note
from pt2mx.pt2e.onnx.export import rewriter_of
from pt2mx.pt2e.onnx.files import as_torch, first_line, serialized, write_model
from pt2mx.pt2e.onnx.function_bodies import add_bodies
from pt2mx.pt2e.onnx.nodes import subgraphs_of
from pt2mx.pt2e.onnx.quantize.graph import FloatGraph, read_float
from pt2mx.pt2e.onnx.quantize.operators import ATEN, OTHER_MATMULS
from pt2mx.pt2e.onnx.quantize.plan import NodePlan, QuantizedOperand, plan, quantizer_of
from pt2mx.pt2e.onnx.quantize.rewrite import Rewriter
from pt2mx.pt2e.report.report import QuantizationReport
from pt2mx.pt2e.report.rows import OperandReport, OperatorReport

#: matmuls in subgraphs, for the report; a Gather is mostly no embedding
_MATMULS = (*(name for name in ATEN if name != "Gather"), *OTHER_MATMULS)


@dataclass(frozen=True)
class OnnxReport(QuantizationReport):
    """The report of a quantized ONNX file.

    Args:
        operators: a row for each node that can be quantized, and for each other matmul, in the order of execution.
        values: the number of values of all constants.
        bytes_before, bytes_after: the bytes of all constants, in the float file and in the quantized one.
        fidelity: `sqnr` in dB and `cosine` of the outputs to the float file's outputs; None without batches.
    """

    fidelity: Fidelity | None = None


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
    scales, which the file decodes. Computed operands are quantized and dequantized at each call. Both are nodes of the
    domain `pt2mx` with functions of standard operators. Blocks run along the dimension that a node reduces. A batch
    norm right after a convolution is first folded into the convolution. Subgraphs (If, Loop, Scan) are not quantized;
    the report says so.

    Args:
        input: the path of the float file. A file of an opset below 18 is converted to 18.
        output: the path of the quantized file.
        config: an `MXQuantizer`, an `MXQuantizationConfig`, the name or file of a recipe, or the dictionary of Quark's
            MX configuration (`element_dtype`, `block_size`, `rounding_mode`; each node sets the axis, as Quark does)
            for weights and activations. The name of a module selects a node by the node's own name ("/encoder/MatMul",
            also "encoder.MatMul"), by a scope that torch.onnx.export recorded, and by the name of the weight ("conv1"
            for "conv1.weight"). The type of a module is an ONNX operator ("Conv") or a recorded class.
        calibration: batches by the names of inputs, to compare the outputs of both files. Quantization needs none: a
            scale depends on its block alone.
        target: "pt2mx", "native", "quark", "standard", "openvino" or "tensorrt", as `pt2mx.export_onnx` takes it.
        allow_nan: quantize weights that hold a NaN or an Inf, which become NaN in blocks.

    Returns:
        An `OnnxReport`, a `QuantizationReport` of the nodes, with `fidelity` if there are batches.

    Raises:
        MXError: for a file that is no float ONNX model or cannot be converted, a setting that is not for ONNX files,
            weights that are not finite, a batch that the model does not accept, and a path at which no file can be
            written. A warning names settings that select no node.

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
    operators, constants = _rows(graph, plans), list(graph.graph.initializer)
    if not any(plans):
        reasons = dict.fromkeys(row.reason for row in operators if row.reason)
        reason = "; ".join(reasons) or "it holds no MatMul, Gemm, Conv, recurrent layer or embedding"
        raise MXError(f"nothing to quantize in {os.fspath(input)!r}: {reason}")
    if not allow_nan:
        _refuse_nan(plans)
    values = sum(math.prod(constant.dims) for constant in constants)
    bytes_before = sum(map(_bytes_of, constants))
    Rewriter(graph).apply(plans)
    bytes_after = sum(map(_bytes_of, graph.graph.initializer))
    agreement = None
    if calibration is not None:  # onnxruntime runs the functions of pt2mx's nodes, whatever the target
        copy = ModelProto()
        copy.CopyFrom(graph.model)
        agreement = _compared(serialized(add_bodies(copy)), os.fspath(input), calibration)
    write_model(rewrite(graph.model), output)
    return OnnxReport(operators, values, bytes_before, bytes_after, agreement)


def _refuse_nan(plans: list[NodePlan]) -> None:
    constants: dict[str, TensorProto] = {}
    for node in plans:
        constants |= {o.source.constant.name: o.source.constant for o in node.operands if o.source}
    names = [name for name, constant in constants.items() if not as_torch(constant).isfinite().all()]
    if names:
        raise MXError(f"NaN or Inf in the weights {listed(names)}: replace them, or allow NaN to quantize all the same")


def _compared(quantized: bytes, path: str, batches: Iterable[Mapping[str, np.ndarray]]) -> Fidelity:
    runtime = import_extra("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # log fatal errors alone: onnxruntime raises the others
    try:
        sessions = [runtime.InferenceSession(m, options, providers=["CPUExecutionProvider"]) for m in (path, quantized)]
    except Exception as error:  # onnxruntime's error, such as for a missing operator
        raise MXError(f"cannot compare outputs: onnxruntime does not run {path!r}: {first_line(error)}") from None
    return fidelity((got, want) for want, got in _outputs(sessions, batches))


def _outputs(sessions: list[Any], batches: Iterable[Mapping[str, np.ndarray]]) -> Iterator[list[list[torch.Tensor]]]:
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise MXError(f"batch {number} must be a mapping of inputs by name, not of type {type(batch).__name__}")
        try:
            feeds = {name: np.asarray(value) for name, value in batch.items()}
            outputs = [[torch.from_numpy(np.asarray(y)) for y in session.run(None, feeds)] for session in sessions]
        except Exception as error:  # onnxruntime's error about names, types or shapes
            raise MXError(f"batch {number}: {first_line(error)}") from None
        yield outputs


def _rows(graph: FloatGraph, plans: list[NodePlan]) -> tuple[OperatorReport, ...]:
    planned = {plan.node.name: plan for plan in plans}
    counted: set[object] = set()
    rows: list[OperatorReport] = []
    for node in graph.graph.node:
        if node.name in planned:
            rows.append(_row(planned[node.name], counted))
        elif node.op_type in OTHER_MATMULS:
            rows.append(_skipped(node, "pt2mx cannot quantize this operator"))
        for subgraph in subgraphs_of(node):
            for inner in subgraph.node:
                if inner.op_type in _MATMULS:
                    rows.append(_skipped(inner, f"inside the sub-graph of {node.name}"))
    return tuple(rows)


def _skipped(node: NodeProto, reason: str) -> OperatorReport:
    return OperatorReport(node.name, "", node.op_type, (), reason)


def _row(plan: NodePlan, counted: set[object]) -> OperatorReport:
    operands = [_operand(operand, counted) for operand in plan.operands]
    if plan.output is not None:
        operands.append(OperandReport("output", str(plan.output), None, {}, 0, 0, 0))
    module = plan.module or plan.node.name
    reason = "; ".join(plan.reasons) or None
    return OperatorReport(plan.node.name, module, plan.node.op_type, tuple(operands), reason, plan.remark)


def _operand(operand: QuantizedOperand, counted: set[object]) -> OperandReport:
    """Return the report of an operand.

    It has the bytes of the constant unless they are `counted` already: once as floats, and once for each spec.
    """
    values = before = after = 0
    storage = None
    if operand.source is not None:
        constant = operand.source.constant
        if constant.name not in counted:
            values, before = math.prod(constant.dims), _bytes_of(constant)
        if (constant.name, operand.spec) not in counted:
            after = packed_bytes(constant.dims, operand.spec)
        storage = storage_note(constant.dims, operand.spec)
        counted |= {constant.name, (constant.name, operand.spec)}
    return OperandReport(operand.role, str(operand.spec), None, {}, values, before, after, storage)


def _bytes_of(constant: TensorProto) -> int:
    return math.prod(constant.dims) * helper.tensor_dtype_to_np_dtype(constant.data_type).itemsize
