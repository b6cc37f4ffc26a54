"""What counts as matmul-like: the operators that a report has to name, quantized or not."""

from __future__ import annotations

from torch.fx import GraphModule, Node

import pt2mx

#: operators, by name without namespace and overload, that multiply and sum along a dimension
MATMUL_LIKE = frozenset(
    "addbmm addmm addmv baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d conv_transpose3d convolution _convolution dot einsum gru gru_cell inner linear linalg_multi_dot "
    "linalg_vecdot lstm lstm_cell matmul mm mv rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell "
    "scaled_dot_product_attention tensordot vdot _grouped_mm grouped_mm_fallback "
    "_native_multi_head_attention _transformer_encoder_layer_fwd".split()
)


def matmul_like(model: GraphModule) -> list[Node]:
    """Those of a graph and of the graphs nested in it."""
    graphs = [module.graph for module in model.modules() if isinstance(module, GraphModule)]
    return [node for graph in graphs for node in graph.nodes if _name(node) in MATMUL_LIKE]


def silent(converted: GraphModule) -> list[str]:
    """The matmul-like operators that are neither quantized nor in the report with a reason."""
    report = pt2mx.quantization_report(converted)
    told = {operator.name for operator in report.operators if operator.quantized or operator.reason}
    return [f"{_name(node)} ({node.name})" for node in matmul_like(converted) if node.name not in told]


def _name(node: Node) -> str | None:
    schema = getattr(node.target, "_schema", None)
    return schema.name.rpartition("::")[2] if node.op == "call_function" and schema is not None else None
