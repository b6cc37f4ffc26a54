"""Call `pt2mx.quantize_onnx` for a model or a file, with Quark's config.

The one module of this folder that imports the flow: `ModelQuantizer` imports it when it quantizes.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pt2mx.errors import MXError, nearest
from pt2mx.pt2e.onnx.files import read_model
from pt2mx.pt2e.onnx.function import onnx
from pt2mx.pt2e.onnx.quantize.graph import read_float
from pt2mx.pt2e.onnx.quantize.operators import ATEN
from pt2mx.pt2e.onnx.quantize.quantize_onnx import OnnxReport, quantize_onnx
from pt2mx.pt2e.quantizer.config import MXQuantizationConfig
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.quark.config import QuantizationConfig

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def quantize_model(
    model: str | os.PathLike[str] | ModelProto,
    output: str | os.PathLike[str] | None,
    config: QuantizationConfig,
    batches: Iterable[Mapping[str, np.ndarray]] | None,
) -> tuple[ModelProto | None, OnnxReport]:
    """Quantize a float model, or its file. Return the quantized model, which is None if it is written to `output`, and
    the report.

    Raises:
        MXError: as `quantize_onnx`, and if the config names nodes or types that the model does not have.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "float.onnx") if isinstance(model, onnx.ModelProto) else model
        if isinstance(model, onnx.ModelProto):
            onnx.save(model, path, save_as_external_data=model.ByteSize() >= 2**31)
        named = config.nodes_to_quantize or config.nodes_to_exclude
        quantizer = _quantizer(config, _names(path) if named else set())
        written = os.path.join(folder, "quantized.onnx") if output is None else output
        report = quantize_onnx(path, written, quantizer, batches, target="quark")
        return onnx.load(written) if output is None else None, report


def _quantizer(config: QuantizationConfig, names: set[str]) -> MXQuantizer:
    """Return the quantizer for a config of Quark and a model whose nodes have these names."""
    spec = config.spec()
    activation = None if config.extra_options.get("WeightsOnly") else spec
    quantizer = MXQuantizer().set_global(MXQuantizationConfig(activation=activation, weight=spec))
    types = _types("op_types_to_quantize", config.op_types_to_quantize)
    more = _types("extra_op_types_to_quantize", config.extra_op_types_to_quantize)
    chosen = _named("nodes_to_quantize", config.nodes_to_quantize, names)
    excluded = _named("nodes_to_exclude", config.nodes_to_exclude, names)
    if not (types or chosen or excluded):
        return quantizer

    def is_quantized(node: NodeProto) -> bool | str:
        if types and node.op_type not in types | more:
            return f"op_types_to_quantize has no {node.op_type}"
        if chosen and node.name not in chosen:
            return f"nodes_to_quantize has no {node.name!r}"
        return f"nodes_to_exclude has {node.name!r}" if node.name in excluded else True

    return quantizer.set_filter_function(is_quantized)


def _names(path: str | os.PathLike[str]) -> set[str]:
    """Return the names of the nodes in a file, including the names that `quantize_onnx` gives to nodes without a
    name."""
    models = read_model(path), read_float(path)
    return {node.name for model in models for node in model.graph.node if node.name}


def _types(field: str, types: Iterable[str]) -> set[str]:
    for op_type in types:
        if op_type not in ATEN:
            raise MXError(f"{field}: pt2mx quantizes no operand of a {op_type!r}: {nearest(op_type, ATEN)}")
    return set(types)


def _named(field: str, patterns: Iterable[str], names: set[str]) -> set[str]:
    """Return the names of nodes that equal a pattern, or match one that begins with "^"."""
    selected: set[str] = set()
    for name in patterns:
        if name.startswith("^"):
            try:
                matched = {node for node in names if re.match(name, node)}
            except re.error as error:
                raise MXError(f"{field}: {name!r} is no regular expression: {error}") from None
        else:
            matched = {name} & names
        if not matched:
            raise MXError(f"{field}: the model has no node {name!r}: {nearest(name, sorted(names))}")
        selected |= matched
    return selected
