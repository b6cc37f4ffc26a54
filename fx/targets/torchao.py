"""torchao's `dequantize_mx`: weights in native dtypes, one element a byte, with E8M0 scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2mx.fx.graph.node import Dequantize, node_arg, register_buffer, tensor_of
from pt2mx.fx.graph.tensors import remove_unused, replace_node
from pt2mx.fx.targets.operators import operator_of
from pt2mx.fx.targets.pairs import Pair

_SCHEMA = (
    "(Tensor qdata, Tensor scale, ScalarType elem_dtype, SymInt block_size, ScalarType output_dtype=float32) -> Tensor"
)


def to_torchao(model: GraphModule, pairs: Sequence[Pair], elements: Mapping[str, str]) -> GraphModule:
    """Read each weight by `torchao::dequantize_mx`; its codes and scales get the native dtypes."""
    operator = operator_of("torchao::dequantize_mx", _SCHEMA, "executorch.extension.llm.export.mx", _dequantize)
    for pair in pairs:
        dtype = getattr(torch, elements[pair.spec.element.name])
        with model.graph.inserting_before(pair.node):
            codes = _native(model, f"{pair.name}_qdata", node_arg(pair.node, 0), dtype)
            scale = _native(model, f"{pair.name}_e8m0", node_arg(pair.node, 1), torch.float8_e8m0fnu)
            args = (codes, scale, dtype, pair.spec.block_size, Dequantize.expect(pair.node).dtype)
            new = model.graph.call_function(operator, args)
        replace_node(pair.node, new)
    return remove_unused(model)


def _native(model: GraphModule, name: str, node: Node, dtype: torch.dtype) -> Node:
    """Return a node that reads the bytes of another one's buffer as a dtype."""
    value = tensor_of(model, node).view(dtype)
    native = model.graph.get_attr(register_buffer(model, name, value))
    native.meta["val"] = value
    return native


def _dequantize(
    qdata: Tensor,
    scale: Tensor,
    elem_dtype: torch.dtype,
    block_size: int,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """qdata: (M, K), scale: (M, K / block_size) -> (M, K)."""
    blocks = qdata.to(torch.float32).unflatten(1, (-1, block_size))
    return (blocks * scale.to(torch.float32).unsqueeze(2)).flatten(1).to(output_dtype)
