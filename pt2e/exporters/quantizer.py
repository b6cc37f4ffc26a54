"""`MXExportQuantizer`: quantize a model while an exporter of transformers exports it."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2mx.errors import MXError
from pt2mx.extras import import_extra
from pt2mx.pt2e.files.user_errors import quiet_export, user_errors
from pt2mx.pt2e.flow.convert import convert_pt2e
from pt2mx.pt2e.flow.prepare import prepare_pt2e
from pt2mx.pt2e.optimize.optimize import optimize as optimize_weights
from pt2mx.pt2e.program.sizes import symbolic
from pt2mx.pt2e.quantizer.quantizer import MXQuantizer
from pt2mx.pt2e.report.report import QuantizationReport, quantization_report

import_extra("transformers", "hf")
try:
    from transformers.exporters.quantizers import ExportQuantizer
except ImportError as error:
    raise MXError(
        "MXExportQuantizer needs transformers 5.24 or later, whose exporters take quantizers: "
        "pip install -U transformers"
    ) from error

#: export format -> the function, with its module, that turns an exported converted model into the graph that the
#: exporter reads; None: the converted model itself
FORMATS: dict[str, tuple[str, str] | None] = {
    "dynamo": None,
    "onnx": ("pt2mx.pt2e.exporters.onnx", "onnx_graph"),
    "openvino": ("pt2mx.pt2e.exporters.openvino", "openvino_graph"),
    "executorch": ("pt2mx.pt2e.exporters.executorch", "executorch_graph"),
}


class MXExportQuantizer(ExportQuantizer):
    """The `quantizer` of an export config of transformers: `DynamoConfig(quantizer=MXExportQuantizer("mxfp8"))`.

    It prepares the exported graph, calibrates it, and converts it. The exporter gets the converted graph with operators
    that its host runs: pt2mx's own (Dynamo), ONNX functions (ONNX), native elements and scales for weights (OpenVINO),
    core operators (ExecuTorch).

    Args:
        recipe: the name of a shipped recipe, the path of one, or an `MXQuantizer`.
        calibration_dataset: inputs of the model, a dictionary each; of `generate` for `export_for_generation`. None:
            the inputs of the export. MX scales follow from each tensor; static tensor scales (NVFP4) and algorithms
            need data like that of use.
        optimize: a preset of `pt2mx.optimize` ("fast", "imatrix", "balanced", "best"). None: the algorithms of the
            recipe, if it has some.

    Raises:
        MXError: for an unknown recipe, preset or quantizer, and for transformers before 5.24. The export raises one for
            an operator that the host does not have.

    Example:
        >>> import torch, transformers
        >>> from transformers.exporters import DynamoConfig, DynamoExporter
        >>> from pt2mx import MXExportQuantizer
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> model = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)).eval()
        >>> inputs = {"input_ids": torch.ones(1, 8, dtype=torch.long)}
        >>> quantizer = MXExportQuantizer("mxfp4", [inputs])
        >>> exported = DynamoExporter().export(model, dict(inputs), DynamoConfig(quantizer=quantizer))
        >>> exported(**inputs).last_hidden_state.shape
        torch.Size([1, 8, 32])
        >>> [operator.module for operator in quantizer.report.operators if not operator.quantized]
        []
    """

    quantizes_fx_graph = True
    supported_formats = tuple(FORMATS)

    def __init__(
        self,
        recipe: str | os.PathLike[str] | MXQuantizer,
        calibration_dataset: Iterable[Mapping[str, Any]] | None = None,
        optimize: str | None = None,
    ) -> None:
        super().__init__(calibration_dataset)
        quantizer = recipe if isinstance(recipe, MXQuantizer) else MXQuantizer.from_recipe(recipe)
        if optimize is not None:
            quantizer = MXQuantizer.from_dict(quantizer.to_dict()).set_algorithms(optimize)
        self.quantizer = quantizer
        #: the report of each graph that was quantized, in order; copies of this quantizer add to the same list
        self.reports: list[QuantizationReport] = []

    @property
    def report(self) -> QuantizationReport:
        """The report of the graph that was quantized last.

        Raises:
            MXError: before an export.
        """
        if not self.reports:
            raise MXError("the quantizer has quantized nothing: export a model with it first")
        return self.reports[-1]

    def traced_calibration(self, sample_inputs: dict[str, Any]) -> Any:
        """Return the calibration inputs as the graph takes them.

        `generate` passes a mask for padded prompts alone. A sample without padding gets one where the graph has one.

        Args:
            sample_inputs: the inputs of the export, by name.

        Returns:
            transformers' `CalibrationSet`.
        """
        calibration = super().traced_calibration(sample_inputs)
        mask, traced = sample_inputs.get("attention_mask"), calibration.transform
        if isinstance(mask, Tensor) and mask.dim() == 2:
            calibration.transform = lambda sample: traced(_with_mask(sample, mask.dtype))
        return calibration

    def quantize(self, model: GraphModule, sample_inputs: dict[str, Any], export_format: str) -> GraphModule:
        """Quantize an exported graph for a host. The exporter calls this.

        Args:
            model: the graph module of the exported model.
            sample_inputs: the inputs of the export, by name.
            export_format: "dynamo", "onnx", "openvino" or "executorch".

        Returns:
            The quantized graph module, which the exporter exports again.

        Raises:
            MXError: for another format, for calibration inputs that the graph does not take, and for an operator that
                the host does not have.
        """
        if export_format not in FORMATS:
            raise MXError(f"unknown export format {str(export_format)!r}: it is one of {', '.join(FORMATS)}")
        batches = self.traced_calibration(sample_inputs)
        with torch.no_grad():
            if self.quantizer.algorithms is not None:
                model = optimize_weights(model, self.quantizer, batches)
            prepared = prepare_pt2e(model, self.quantizer)
            for batch in batches:
                with user_errors("calibrate the model"):
                    prepared(**batch)
            converted = convert_pt2e(prepared)
            self.reports.append(quantization_report(prepared))
            form = FORMATS[export_format]
            if form is None:
                return converted
            module, function = form
            to_graph: Callable[[ExportedProgram], GraphModule] = getattr(importlib.import_module(module), function)
            return to_graph(_export(converted, sample_inputs))


def _with_mask(sample: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a sample with a mask of ones, (B, tokens in the cache + S), unless it has a mask or no tokens."""
    tokens = next((sample[name] for name in ("input_ids", "inputs_embeds") if sample.get(name) is not None), None)
    if tokens is None or sample.get("attention_mask") is not None:
        return dict(sample)
    cache = sample.get("cache")
    length = (0 if cache is None else int(cache.get_seq_length())) + tokens.shape[1]
    return {**sample, "attention_mask": torch.ones(tokens.shape[0], length, dtype=dtype, device=tokens.device)}


def _export(model: GraphModule, inputs: dict[str, Any]) -> ExportedProgram:
    """Export a converted model, with the dynamic dimensions of its placeholders."""
    inputs = copy.deepcopy(dict(inputs))
    shapes = ShapesCollection()
    values = [node.meta.get("val") for node in model.graph.find_nodes(op="placeholder")]
    for leaf, value in zip(pytree.tree_leaves(inputs), values, strict=True):
        if isinstance(leaf, Tensor) and isinstance(value, Tensor):
            dynamic = {dim: Dim.AUTO for dim, size in enumerate(value.shape) if symbolic(size) is not None}
            if dynamic:
                shapes[leaf] = dynamic
    with quiet_export(), user_errors("export the quantized model"):
        return torch.export.export(model, (), inputs, dynamic_shapes=shapes.dynamic_shapes(model, (), inputs))
