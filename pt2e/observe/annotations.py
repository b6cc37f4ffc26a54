"""Check the annotations of a quantizer before torchao reads them."""

from __future__ import annotations

from torch.fx import GraphModule

from pt2mx.errors import MXError
from pt2mx.fx.graph.higher_order_ops import graph_modules
from pt2mx.pt2e.observe import torchao_pt2e
from pt2mx.pt2e.observe.qspec import mx_spec


def check_annotations(model: GraphModule, quantizer: torchao_pt2e.Quantizer) -> None:
    """Raise an MXError for an annotation that torchao would assert is none, such as an `MXSpec` by itself, and for an
    MX spec of a node that is no input, which torchao would leave in high precision."""
    for graph in graph_modules(model):
        for node in graph.graph.nodes:
            annotation = node.meta.get(torchao_pt2e.Q_ANNOTATION_KEY)
            if annotation is None:
                continue
            where = f"{type(quantizer).__name__} annotates {node.name} ({node.target})"
            if not isinstance(annotation, torchao_pt2e.QuantizationAnnotation):
                raise MXError(
                    f"{where} with {str(annotation)[:60]!r} of type {type(annotation).__name__}: the meta "
                    f"{torchao_pt2e.Q_ANNOTATION_KEY!r} is a QuantizationAnnotation(input_qspec_map, output_qspec)"
                )
            for key, spec in annotation.input_qspec_map.items():
                if mx_spec(spec) is not None and key not in node.all_input_nodes:
                    raise MXError(
                        f"{where} with a spec for {str(key)[:60]!r}, which is none of its inputs: the keys of "
                        f"input_qspec_map are nodes, here of {', '.join(n.name for n in node.all_input_nodes)}"
                    )
            for spec in (*annotation.input_qspec_map.values(), annotation.output_qspec):
                if spec is not None and not isinstance(spec, torchao_pt2e.QuantizationSpecBase):
                    raise MXError(
                        f"{where} with {str(spec)[:60]!r} of type {type(spec).__name__}: torchao takes a "
                        "QuantizationSpec, which pt2mx.mx_qspec(spec) makes of an MX spec"
                    )
