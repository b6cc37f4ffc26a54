"""The matmul-like operators: a report must name them, quantized or not."""

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


def silent(converted: GraphModule) -> list[str]:
    """Return the matmul-like operators, also in subgraphs, that are neither quantized nor in the report with a
    reason."""
    report = pt2mx.quantization_report(converted)
    told = {operator.name for operator in report.operators if operator.quantized or operator.reason}
    graphs = [(path, module.graph) for path, module in converted.named_modules() if isinstance(module, GraphModule)]
    called = {f"{path}.{n.name}".removeprefix("."): _name(n) for path, graph in graphs for n in graph.nodes}
    return [f"{name} ({node})" for node, name in called.items() if name in MATMUL_LIKE and node not in told]


def _name(node: Node) -> str | None:
    schema = getattr(node.target, "_schema", None)
    return schema.name.rpartition("::")[2] if node.op == "call_function" and schema is not None else None
