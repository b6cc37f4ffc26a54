"""Checks of the annotations that a quantizer has made, before torchao asserts them without a word of what is wrong."""

from __future__ import annotations

from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.pt2e.torchao_pt2e import Q_ANNOTATION_KEY, QuantizationSpecBase, Quantizer


def check_annotations(model: GraphModule, quantizer: Quantizer) -> None:
    """Raise an error where an annotation holds what torchao takes for no spec, such as an `MXSpec` by itself.

    Args:
        model: an annotated graph, with the graphs of its higher-order operators.
        quantizer: which has annotated it; the error names its class.

    Raises:
        MXError: names the operator and the value, and the function that makes a spec.
    """
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            annotation = node.meta.get(Q_ANNOTATION_KEY)
            if annotation is None:
                continue
            for spec in (*annotation.input_qspec_map.values(), annotation.output_qspec):
                if spec is not None and not isinstance(spec, QuantizationSpecBase):
                    raise MXError(
                        f"{type(quantizer).__name__} annotates {node.name} ({node.target}) with {str(spec)[:60]!r} of "
                        f"type {type(spec).__name__}: torchao takes a QuantizationSpec, which pt2mx.mx_qspec(spec) "
                        "makes of an MX spec"
                    )
